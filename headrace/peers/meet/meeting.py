"""Stages meet: at the store of stage 0, each proves that it knows the secret, and from then on shows that it lives.

Whenever a stage is lost, all meet again. A meeting has groups of its own, so that no late message can reach the next one.

Invariant: whatever else anybody writes into the store, no stage is ended, held up or misled by it (`peers.meet.board`).
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from headrace.peers.meet.address import Address
from headrace.peers.meet.board import Board, take_news
from headrace.peers.meet.lane import END_SECONDS
from headrace.peers.meet.proof import is_plain, nonce, why_refused
from headrace.peers.meet.ranks import Ranks
from headrace.peers.meet.stores import hosted_store, joined_store, refuse_without_secret
from headrace.peers.meet.watchman import Watchman
from headrace.terms.closing import Closing
from headrace.terms.errors import ConfigError, PeerLost

_LOOK_SECONDS, _BEATS = 0.05, 6
_MEETING = "meeting"
_INVITED, _HELLO = {"token": str, "stages": int}, {"nonce": str, "version": str}
# How often a stage looks for an invitation that has a proof before it takes one without: stage 0 may have another secret.
_LOOKS = 20


class Meeting(Closing):
    """Where the stages at `addresses` meet; this process is `stage`. A stage that is silent for `silence_seconds` is lost.

    Raises:
        ConfigError: stage 0's address cannot be used; or other machines can reach it, and there is no secret.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        stage: int,
        *,
        version: str,
        secret: bytes | None = None,
        silence_seconds: float = 20.0,
        wait_seconds: float = 600.0,
    ) -> None:
        refuse_without_secret(addresses, secret, "stages")
        self._addresses, self._stage, self._version, self._secret = addresses, stage, version, secret or b""
        self._silence_seconds, self._wait_seconds = silence_seconds, wait_seconds
        self._names = tuple(f"stage {each} at {address}" for each, address in enumerate(addresses))
        self._met, self._over, self._threads = "", threading.Event(), list[Watchman]()
        self._host = hosted_store(addresses[0], key="stages") if stage == 0 else None

    def meet(self, lanes: Sequence[str], tell: Callable[[str], None], check: Callable[[], None] = lambda: None) -> Ranks:
        """Wait for all stages, and return the ranks that they are. `tell` gets messages while it waits; `check` may raise what
        ends the waiting.

        Raises:
            PeerLost: a stage went while all met; meet again.
            MembershipFailed: a thread that watched over the meeting before has died.
            ConfigError: stage 0 refuses this stage, or does not know the secret.
        """
        self._end_watch()  # of the meeting before
        self._over = threading.Event()
        store = self._host or self._connect(check, tell)
        try:
            board = self._invite(store, tell, check) if self._host else self._accept(store, check, tell)
            own = self._addresses[self._stage].number(key="stages")
            names = self._names
            ranks = Ranks(board.lanes(), self._stage, len(names), host=own, names=names, lanes=lanes)
            beats = self._board(self._host_client(), board.session)
        except DistError as error:
            raise PeerLost(f"{self._names[0]}: is gone") from error
        over, seen = self._over, [time.monotonic()]
        works = {
            "the heartbeat": lambda: self._beat(ranks, over, seen, beats),
            "the watch": lambda: self._watch(ranks, over, seen),
        }
        self._threads += [Watchman(work, name, ranks.end) for name, work in works.items()]
        return ranks

    def close(self) -> None:
        """End it: other stages find nobody. A second call does nothing."""
        self._end_watch(quietly=True)
        self._host = None

    def _end_watch(self, *, quietly: bool = False) -> None:
        self._over.set()
        while self._threads:  # one that is in a call of the store while Python ends would end the process with an abort
            thread = self._threads.pop()
            thread.join(END_SECONDS)
            if not quietly:
                thread.check()

    # -- stage 0 --------------------------------------------------------------------------------------------------------

    def _invite(self, store: TCPStore, tell: Callable[[str], None], check: Callable[[], None]) -> Board:
        public, board = Board(store, self._secret), self._board(store, nonce())
        public.put(_MEETING, {"token": board.session, "stages": len(self._addresses)})
        invited, refused = public.raw(_MEETING), set[str]()
        missing, told = set(range(1, len(self._addresses))), time.monotonic() + 1.0
        while missing:
            check()
            if public.raw(_MEETING) != invited:
                public.drop(_MEETING)
                public.put(_MEETING, {"token": board.session, "stages": len(self._addresses)})
                invited = public.raw(_MEETING)
            for stage in sorted(missing):
                if (answer := self._answer(board, stage)) == {}:
                    missing.discard(stage)
                elif answer is not None and (words := f"{self._names[stage]}: refused: {answer['refused']}") not in refused:
                    refused.add(words)
                    tell(words)
            if missing and time.monotonic() > told:
                told = float("inf")
                tell(f"waiting for {', '.join(self._names[stage] for stage in sorted(missing))}")
            for each in (public, board):
                take_news(each, tell)
            time.sleep(_LOOK_SECONDS)
        board.put("go", True)
        return board

    def _answer(self, board: Board, stage: int) -> dict[str, str] | None:
        """Return what a stage is answered that has said hello, {} for welcome; None where none has."""
        said, is_proven = board.claimed(key := f"hello/{stage}", _HELLO)
        if said is None:
            return None
        board.remove(key)
        words = why_refused(is_proven, said["version"], self._version)
        answer = {} if words is None else {"refused": words}
        if is_plain(said["nonce"]):
            board.put(f"answer/{said['nonce']}", answer)
        return answer

    # -- the others -----------------------------------------------------------------------------------------------------

    def _connect(self, check: Callable[[], None], tell: Callable[[str], None]) -> TCPStore:
        end, told = time.monotonic() + self._wait_seconds, False
        while True:
            check()
            with contextlib.suppress(PeerLost):
                return self._host_client()
            if time.monotonic() > end:
                raise ConfigError(
                    f"{self._names[0]}: nothing has listened there for {self._wait_seconds:g} s; start stage 0, or give --wait "
                    "more"
                )
            if not told:
                told = True
                tell(f"waiting for {self._names[0]}")
            time.sleep(0.2)

    def _accept(self, store: TCPStore, check: Callable[[], None], tell: Callable[[str], None]) -> Board:
        """Say hello to stage 0 until it has answered, and return the board of the meeting once all are there."""
        end, looks, public = time.monotonic() + self._wait_seconds, 0, Board(store, self._secret)
        board: Board | None = None
        is_known, own = False, ""
        while True:
            check()
            if time.monotonic() > end:
                raise ConfigError(f"{self._names[0]}: has not begun for {self._wait_seconds:g} s; is it another run's?")
            found, is_proven = public.claimed(_MEETING, _INVITED)
            if found is not None and not is_plain(found["token"]):
                found = None
            looks = 0 if found is None or is_proven else looks + 1
            if (
                found is not None
                and (is_proven or looks > _LOOKS)
                and found["token"] not in (board and board.session, self._met)
            ):
                if found["stages"] != len(self._addresses):
                    raise ConfigError(
                        f"stages: stage 0 names {found['stages']}, here are {len(self._addresses)}; name the same"
                    )
                board, own, is_known = self._board(store, found["token"]), nonce(), is_proven
                self._hello(board, own)
            if board is not None and own:
                own = self._heed(board, own, is_known=is_known)
            if board is not None and not own and board.get("go", bool):
                self._met = board.session
                return board
            for each in (public, board):
                if each is not None:
                    take_news(each, tell)
            time.sleep(_LOOK_SECONDS)

    def _board(self, store: TCPStore, token: str) -> Board:
        """Return what those write who meet under this token."""
        return Board(store, self._secret, token, f"{token}/")

    def _hello(self, board: Board, own: str) -> None:
        board.put(f"hello/{self._stage}", {"nonce": own, "version": self._version})

    def _heed(self, board: Board, own: str, *, is_known: bool) -> str:
        """Return "" if stage 0 has answered the hello of the nonce `own`; if it has not, say it again where it is not there.

        Raises:
            ConfigError: stage 0 refuses this stage; who has another secret than stage 0 hears it without a proof.
        """
        answer, is_proven = board.claimed(f"answer/{own}", {})
        if answer is not None and (is_proven or not is_known):
            if isinstance(words := answer.get("refused"), str):
                raise ConfigError(f"{self._names[0]}: refuses this stage: {words}")
            if is_proven:
                return ""
        elif board.get(f"hello/{self._stage}", _HELLO) is None:
            self._hello(board, own)
        return own

    def _host_client(self) -> TCPStore:
        return joined_store(self._addresses[0], self._names[0], key="stages")

    # -- who lives ------------------------------------------------------------------------------------------------------

    def _beat(self, ranks: Ranks, over: threading.Event, seen: list[float], board: Board) -> None:
        """Show that this stage lives, and look whether the others do."""
        known: dict[int, tuple[int, float]] = {}
        others, count = [each for each in range(len(self._addresses)) if each != self._stage], 0
        while not over.wait(self._silence_seconds / _BEATS):
            count += 1
            try:
                board.put(f"beat/{self._stage}", count)
                for each in others:
                    found = board.get(f"beat/{each}", int) or 0
                    if each not in known or found > known[each][0]:  # an older one says nothing
                        known[each] = found, time.monotonic()
                    elif time.monotonic() - known[each][1] > self._silence_seconds:
                        ranks.end(f"{self._names[each]}: shows no sign of life for {self._silence_seconds:g} s")
            except DistError:
                if not over.is_set():
                    ranks.end(f"{self._names[0]}: is gone")
                return
            seen[0] = time.monotonic()

    def _watch(self, ranks: Ranks, over: threading.Event, seen: list[float]) -> None:
        """Look whether stage 0, which may be stopped in the middle of an answer, still answers."""
        while not over.wait(1.0):
            if self._stage and time.monotonic() - seen[0] > self._silence_seconds:
                ranks.end(f"{self._names[0]}: shows no sign of life for {self._silence_seconds:g} s")
                return


def own_stage(addresses: Sequence[Address], asked: int | None) -> int:
    """Return which of `addresses` is this machine's, if not the one that is `asked` for.

    Raises:
        ConfigError: there are not two of them, there is no such stage; or none, or several, are this machine's.
    """
    if len(addresses) < 2:
        raise ConfigError(f"stages: names {len(addresses)}; give HOST:PORT of at least two, with commas between them")
    if asked is not None:
        if not 0 <= asked < len(addresses):
            raise ConfigError(f"stage: {asked} is none of the stages 0 to {len(addresses) - 1}")
        return asked
    own = []
    for stage, address in enumerate(addresses):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address.number(key="stages"), 0))
            own.append(stage)
    if len(own) != 1:
        raise ConfigError(f"stages: {len(own)} of these addresses are this machine's; say which by --stage K, from 0")
    return own[0]
