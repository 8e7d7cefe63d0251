"""Writes ``schema.json``, for editors that check YAML while it is typed: ``python -m delta.policies.schema``."""

import json
from pathlib import Path

from delta.config import Policy


def text() -> str:
    """The file's content: the JSON schema of a policy."""
    return json.dumps(Policy.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("schema.json").write_text(text(), encoding="utf-8")
