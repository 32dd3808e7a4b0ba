"""What peers write for one another into a store to which anybody on the network may write.

Each value is JSON, with a proof that its writer knows the secret, for that key and that session. Invariant: what is no such
value
is never taken: it is counted, and passed over as if it were not there. Reading never waits: a key that somebody removes between
two looks is one that is not there.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from headrace.peers.meet.lane import has_keys
from headrace.peers.meet.proof import is_proof, proof

# What is compared with a key's value, which it never equals: a store then tells the value, or this where there is none.
_NOTHING = "\0nothing is here"
# Values that were passed over are remembered for so many keys: each counts once, however often it is read.
_MOST_KEYS = 1024

Kind = type | Mapping[str, Any]


class Board:
    """The values in `store`, under keys that begin with `prefix`. Those of a `session` count in it alone."""

    def __init__(self, store: Store, secret: bytes, session: str = "", prefix: str = "") -> None:
        self.store, self.session, self._secret, self._prefix = store, session, secret, prefix
        self.num_dropped = 0
        self.news: list[str] = []
        self._dropped: dict[str, bytes] = {}

    def put(self, key: str, value: Any) -> None:
        """Write a JSON value."""
        whole = value if isinstance(value, dict) else {"value": value}
        self.store.set(self._prefix + key, json.dumps({**whole, "proof": proof(self._secret, *self._words(key, whole))}))

    def raw(self, key: str) -> bytes | None:
        """Return whatever is there now, None for nothing."""
        found: bytes = self.store.compare_set(self._prefix + key, _NOTHING, _NOTHING)
        return None if found == _NOTHING.encode() else found

    def get(self, key: str, kind: Kind) -> Any:
        """Return a member's value of this `kind`, a type or the keys of an object with their types. None: there is none."""
        value, is_proven = self.claimed(key, kind)
        if value is not None and not is_proven:
            self.drop(key)
        return value if is_proven else None

    def claimed(self, key: str, kind: Kind) -> tuple[Any, bool]:
        """Return a value of this `kind`, None for none, and whether it has the right proof: a claim of somebody without it may
        be answered, and is not believed.
        """
        found = self.raw(key)
        if found is None:
            return None, False
        try:
            whole = json.loads(found)
            keys = kind if isinstance(kind, Mapping) else {"value": kind}
            if has_keys(whole, {**keys, "proof": str}):
                is_proven = is_proof(whole.pop("proof"), self._secret, *self._words(key, whole))
                return whole if isinstance(kind, Mapping) else whole["value"], is_proven
        except (ValueError, RecursionError):
            pass
        self.drop(key, found)
        return None, False

    def drop(self, key: str, found: bytes = b"") -> None:
        """Count a value that is passed over. `news` gets a line for the first, the tenth, the hundredth and so on."""
        if self._dropped.get(key) == found[:256]:
            return
        if len(self._dropped) >= _MOST_KEYS:
            self._dropped.clear()
        self._dropped[key] = found[:256]
        self.num_dropped += 1
        if set(str(self.num_dropped)[1:]) <= {"0"} and str(self.num_dropped)[0] == "1":
            many = "a value" if self.num_dropped == 1 else f"{self.num_dropped} values"
            self.news.append(
                f"{many} in the store of this run had no proof of a member, and came to nothing (the last under {key[:60]!r}); "
                "who else can reach this address?"
            )

    def close(self) -> None:
        """Let the store go: one that listens does so until nobody has it."""
        with contextlib.suppress(AttributeError):
            del self.store

    def lanes(self) -> Store:
        """Return the store in which the members' lanes meet: its keys are not to be guessed."""
        return PrefixStore(self._prefix + proof(self._secret, *self._words("lanes", {})), self.store)

    def remove(self, key: str) -> None:
        """Remove what is there."""
        self.store.delete_key(self._prefix + key)

    def _words(self, key: str, whole: Mapping[str, Any]) -> tuple[str, ...]:
        return "board", self.session, key, json.dumps(whole, sort_keys=True)


def take_news(board: Board, tell: Callable[[str], None]) -> None:
    """Tell the board's news, each once."""
    while board.news:
        tell(board.news.pop(0))
