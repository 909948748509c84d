"""What stands in an event in place of its content fields when they are encrypted."""

from pydantic import BaseModel, ConfigDict, Field

from schemas.arrays import BlobReference


class EncryptedContent(BaseModel):
    """The field `encrypted` of an event. The others, whatever is not content, stand beside it as ever."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    algorithm: str
    """`zstd+A256GCM`: JSON of the content fields, compressed by zstd, encrypted by AES-256-GCM."""
    data: str = Field(min_length=1)
    """Base64 of a nonce of 12 bytes, the ciphertext and a tag of 16. Associated data: CloudEvents type and id, the
    record's key and the id of the encryption key, joined by 0x1F."""
    blobs: list[BlobReference] = Field(default=[])
    """The blobs that the content names, without their keys: forgetting removes what it cannot read."""
