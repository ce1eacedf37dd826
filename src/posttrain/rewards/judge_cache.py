"""Replies of judges on disk, by all that decided them: the same question is never paid for twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ReplyCache:
    """A SQLite file of request -> reply; several processes may share it. Holds no keys and no headers."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, timeout=30, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")

    def get(self, request: Mapping[str, Any]) -> str | None:
        with self._lock:
            row = self._database.execute("SELECT reply FROM replies WHERE key = ?", (request_key(request),)).fetchone()
        return None if row is None else row[0]

    def put(self, request: Mapping[str, Any], reply: str) -> None:
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (request_key(request), reply))

    def close(self) -> None:
        with self._lock:
            self._database.close()


def request_key(request: Mapping[str, Any]) -> str:
    text = json.dumps(request, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()
