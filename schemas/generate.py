"""Writes the JSON Schemas: `python -m schemas.generate`.

`schemas/json` always shows the models as they are. `--release` also freezes them in `schemas/released`, which holds
every version ever released: the tests compare the models with all of it. Freeze only when a release is made.
"""

import argparse
import sys
from pathlib import Path

from schemas.json_schema import rendered_schemas

FOLDER = Path(__file__).parent


def main(arguments: list[str] | None = None) -> int:
    """Writes the files that differ and names them. Always returns 0."""
    parser = argparse.ArgumentParser(prog="python -m schemas.generate", description=__doc__)
    parser.add_argument("--release", action="store_true", help="also freeze the schemas in schemas/released")
    options = parser.parse_args(arguments)
    for folder in (FOLDER / "json", *([FOLDER / "released"] if options.release else [])):
        folder.mkdir(exist_ok=True)
        for name, content in rendered_schemas().items():
            file = folder / name
            if not file.exists() or file.read_text(encoding="utf-8") != content:
                file.write_text(content, encoding="utf-8")
                sys.stdout.write(f"wrote {folder.name}/{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
