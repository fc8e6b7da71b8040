"""What a run found, on disk the moment it is known: a pod that goes away takes only what came after the last line."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EvidenceFile:
    """One JSON object a line, appended and synced; the file and its folder are made with the first line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        """Appends {"kind": kind, **record}."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **record}) + "\n")
            file.flush()
            os.fsync(file.fileno())
