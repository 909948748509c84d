"""Number arrays inside events: base64 little-endian blocks, never JSON lists.

A 32,768-token turn with its log-probs is 0.39 MB so, against 0.65 MB as JSON lists, and decodes without
parsing digits. A block above the inline limit lives in a content-addressed blob instead (`BlobReference`).
"""

import base64
import binascii
import math
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

DataType = Literal["int32", "int64", "float16", "float32", "float64", "uint8"]

MAX_INLINE_BYTES = 256 * 1024
"""Above this many raw bytes an array is stored as a blob."""
ENCRYPTION_OVERHEAD_BYTES = 28
"""Of AES-256-GCM: a nonce of 12 bytes and a tag of 16."""


class BlobReference(BaseModel):
    """Where the bytes of an array are, when they are too many to travel inside the event."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    uri: str = Field(min_length=1)
    """fsspec URL of the object. Its last part is the checksum, so that a retry writes the same object."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Checksum of the object's bytes in hexadecimal, verified by every reader."""
    size_bytes: int = Field(ge=0)
    """Length of the object in bytes."""
    encryption_key: str = ""
    """Base64 of the AES-256-GCM key that encrypts this object alone; empty for a plain one. As secret as the content:
    it stands only inside what the key of the session encrypts, so that the blob is lost with that key."""

    @property
    def content_bytes(self) -> int:
        """Length of what is in it: an encrypted object has a nonce before it and a tag behind."""
        return self.size_bytes - ENCRYPTION_OVERHEAD_BYTES if self.encryption_key else self.size_bytes


class NumberArray(BaseModel):
    """An n-dimensional array of numbers, row-major and little-endian."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    dtype: DataType
    """Type of one element."""
    shape: list[Annotated[int, Field(ge=0)]]
    """Length of each axis."""
    data: str | None = None
    """The elements in base64; null when they are in `blob`."""
    blob: BlobReference | None = None
    """The elements as a blob; null when they are in `data`."""

    @model_validator(mode="after")
    def _exactly_one_source_of_the_right_size(self) -> "NumberArray":
        if (self.data is None) == (self.blob is None):
            raise ValueError("exactly one of data and blob must be given")
        expected_bytes = self.size_bytes
        if self.data is not None:
            try:
                found_bytes = len(base64.b64decode(self.data, validate=True))
            except binascii.Error as error:
                raise ValueError(f"data is not base64: {error}") from error
        else:
            assert self.blob is not None
            found_bytes = self.blob.content_bytes
        if found_bytes != expected_bytes:
            raise ValueError(f"shape {self.shape} of {self.dtype} needs {expected_bytes} bytes, found {found_bytes}")
        return self

    @property
    def element_count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Length of the raw block in bytes."""
        return self.element_count * np.dtype(self.dtype).itemsize

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any]) -> "NumberArray":
        """Packs `array` inline. Raises ValueError for an element type that events do not carry."""
        little_endian = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return cls(
            dtype=array.dtype.name,  # pyright: ignore[reportArgumentType] - pydantic checks it
            shape=list(array.shape),
            data=base64.b64encode(little_endian.tobytes()).decode("ascii"),
        )

    def to_numpy(self) -> npt.NDArray[Any]:
        """The elements, read-only. Raises ValueError when they are in a blob: resolve it first (`clawstream.blobs`)."""
        if self.data is None:
            raise ValueError("the array is in a blob; resolve it before use")
        return from_bytes(base64.b64decode(self.data), self.dtype, self.shape)


def from_bytes(block: bytes, dtype: DataType, shape: list[int]) -> npt.NDArray[Any]:
    """A read-only array over `block`, which holds little-endian elements of `dtype`."""
    return np.frombuffer(block, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)


def int32_array(values: list[int] | npt.NDArray[Any]) -> NumberArray:
    """Token ids. [tokens]"""
    return NumberArray.from_numpy(np.asarray(values, dtype=np.int32))


def float32_array(values: list[float] | npt.NDArray[Any]) -> NumberArray:
    """Log-probs in nats. [tokens]"""
    return NumberArray.from_numpy(np.asarray(values, dtype=np.float32))
