"""Records in memory."""

from collections.abc import Mapping

from gateway.state.records import FileRecords, TextsByKind


class MemoryRecords(FileRecords):
    """Records in memory; the tests of `FileRecords` also run against them."""

    def __init__(self) -> None:
        self.texts: TextsByKind = {}
        self.readers = []

    async def all(self, kind: str) -> Mapping[str, str]:
        return dict(self.texts.get(kind, {}))

    async def add(self, kind: str, name: str, text: str) -> bool:
        texts_by_name = self.texts.setdefault(kind, {})
        new = name not in texts_by_name
        texts_by_name.setdefault(name, text)
        return new

    async def replace(self, kind: str, name: str, text: str) -> None:
        texts_by_name = self.texts.get(kind, {})
        if name in texts_by_name:
            texts_by_name[name] = text

    async def remove(self, kind: str, name: str) -> None:
        self.texts.get(kind, {}).pop(name, None)

    def hold(self, kind: str, name: str, text: str) -> None:
        self.texts.setdefault(kind, {}).setdefault(name, text)
