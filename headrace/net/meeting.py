"""Stages meet: at the store of stage 0, each proves that it knows the secret, and from then on shows that it lives.

Whenever a stage is lost, all meet again. A meeting has groups of its own, so that no late message can reach the next one.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from headrace.net.address import Address
from headrace.net.lane import END_SECONDS
from headrace.net.proof import is_proof, nonce, proof
from headrace.net.ranks import Ranks
from headrace.terms.closing import Closing
from headrace.terms.errors import ConfigError, PeerLost

_LOOK_SECONDS, _BEATS = 0.05, 6
_STORE_TIMEOUT = timedelta(seconds=10)
_MEETING = "meeting"


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
        if secret is None and not all(address.is_loopback for address in addresses):
            raise ConfigError("stages: other machines can reach these addresses; give --secret FILE, the same file on each")
        self._addresses, self._stage, self._version, self._secret = addresses, stage, version, secret or b""
        self._silence_seconds, self._wait_seconds = silence_seconds, wait_seconds
        self._names = tuple(f"stage {each} at {address}" for each, address in enumerate(addresses))
        self._met, self._over, self._threads = "", threading.Event(), list[threading.Thread]()
        self._host = _listening(addresses[0]) if stage == 0 else None

    def meet(self, lanes: Sequence[str], tell: Callable[[str], None], check: Callable[[], None] = lambda: None) -> Ranks:
        """Wait for all stages, and return the ranks that they are. `tell` gets messages while it waits; `check` may raise what
        ends the waiting.

        Raises:
            PeerLost: a stage went while all met; meet again.
            ConfigError: stage 0 refuses this stage, or does not know the secret.
        """
        self._end_watch()  # of the meeting before
        self._over = threading.Event()
        store = self._host or self._connect(check, tell)
        try:
            token = self._invite(store, tell, check) if self._host else self._accept(store, check, tell)
            own = self._addresses[self._stage].number(key="stages")
            prefixed = PrefixStore(token, store)
            names = self._names
            ranks = Ranks(prefixed, self._stage, len(names), host=own, names=names, lanes=lanes)
            beats = self._host_client()
        except (DistError, RuntimeError) as error:
            raise PeerLost(f"{self._names[0]}: is gone") from error
        seen = [time.monotonic()]
        for work in (self._beat, self._watch):
            args = (ranks, self._over, seen, *((beats, token) if work == self._beat else ()))
            self._threads.append(threading.Thread(target=work, args=args, name=f"headrace {work.__name__}", daemon=True))
            self._threads[-1].start()
        return ranks

    def close(self) -> None:
        """End it: other stages find nobody. A second call does nothing."""
        self._end_watch()
        self._host = None

    def _end_watch(self) -> None:
        self._over.set()
        while self._threads:  # one that is in a call of the store while Python ends would end the process with an abort
            self._threads.pop().join(END_SECONDS)

    # -- stage 0 --------------------------------------------------------------------------------------------------------

    def _invite(self, store: TCPStore, tell: Callable[[str], None], check: Callable[[], None]) -> str:
        token, challenge = nonce(), nonce()
        store.set(_MEETING, json.dumps({"token": token, "challenge": challenge, "stages": len(self._addresses)}))
        missing, told = set(range(1, len(self._addresses))), time.monotonic() + 1.0
        while missing:
            check()
            for stage in sorted(missing):
                if store.check([key := f"{token}/hello/{stage}"]):
                    said = json.loads(store.get(key))
                    store.delete_key(key)
                    if not (answer := self._answer(said, stage, challenge)).get("refused"):
                        missing.discard(stage)
                    else:
                        tell(f"{self._names[stage]}: refused: {answer['refused']}")
                    store.set(f"{token}/answer/{said['nonce']}", json.dumps(answer))
            if missing and time.monotonic() > told:
                told = float("inf")
                tell(f"waiting for {', '.join(self._names[stage] for stage in sorted(missing))}")
            time.sleep(_LOOK_SECONDS)
        store.set(f"{token}/go", "1")
        return token

    def _answer(self, said: dict[str, Any], stage: int, challenge: str) -> dict[str, str]:
        own = str(said.get("nonce"))
        if not is_proof(str(said.get("proof")), self._secret, "stage", challenge, str(stage), own):
            return {"refused": "it does not have the secret; give all the same --secret FILE"}
        if said.get("version") != self._version:
            return {"refused": f"it is headrace {said.get('version')}, this is {self._version}; install the same version"}
        return {"proof": proof(self._secret, "first", own)}

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

    def _accept(self, store: TCPStore, check: Callable[[], None], tell: Callable[[str], None]) -> str:
        end, told, token = time.monotonic() + self._wait_seconds, "", ""
        while True:
            check()
            if time.monotonic() > end:
                raise ConfigError(f"{self._names[0]}: has not begun for {self._wait_seconds:g} s; is it another run's?")
            found = json.loads(store.get(_MEETING)) if store.check([_MEETING]) else None
            if found is not None and found["token"] not in (token, self._met):
                if found["stages"] != len(self._addresses):
                    raise ConfigError(
                        f"stages: stage 0 names {found['stages']}, here are {len(self._addresses)}; name the same"
                    )
                token, own = found["token"], nonce()
                said = proof(self._secret, "stage", found["challenge"], str(self._stage), own)
                hello = {"nonce": own, "proof": said, "version": self._version}
                store.set(f"{token}/hello/{self._stage}", json.dumps(hello))
                told = f"{token}/answer/{own}"
            if token and told and store.check([told]):
                answer = json.loads(store.get(told))
                if "refused" in answer:
                    raise ConfigError(f"{self._names[0]}: refuses this stage: {answer['refused']}")
                if not is_proof(str(answer.get("proof")), self._secret, "first", own):
                    raise ConfigError(f"{self._names[0]}: does not have this stage's secret; give all the same --secret FILE")
                told = ""
            if token and not told and store.check([f"{token}/go"]):
                self._met = token
                return str(token)
            time.sleep(_LOOK_SECONDS)

    def _host_client(self) -> TCPStore:
        host = self._addresses[0].number(key="stages")
        try:
            # The library would try again and again, with warnings, so a plain connection is tried first.
            socket.create_connection((host, self._addresses[0].port), timeout=5.0).close()
            return TCPStore(host, self._addresses[0].port, is_master=False, timeout=_STORE_TIMEOUT)
        except (OSError, DistError, RuntimeError) as error:
            raise PeerLost(f"{self._names[0]}: nothing listens there") from error

    # -- who lives ------------------------------------------------------------------------------------------------------

    def _beat(self, ranks: Ranks, over: threading.Event, seen: list[float], store: TCPStore, token: str) -> None:
        """Show that this stage lives, and look whether the others do."""
        known: dict[int, tuple[bytes, float]] = {}
        others, count = [each for each in range(len(self._addresses)) if each != self._stage], 0
        while not over.wait(self._silence_seconds / _BEATS):
            count += 1
            try:
                store.set(f"{token}/beat/{self._stage}", str(count))
                for each in others:
                    key = f"{token}/beat/{each}"
                    found = store.get(key) if store.check([key]) else b""
                    if each not in known or found != known[each][0]:
                        known[each] = found, time.monotonic()
                    elif time.monotonic() - known[each][1] > self._silence_seconds:
                        ranks.end(f"{self._names[each]}: shows no sign of life for {self._silence_seconds:g} s")
            except (DistError, RuntimeError):
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


def _listening(address: Address) -> TCPStore:
    host = address.number(key="stages")
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, address.port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"stages: {address}: cannot be listened at ({error.strerror}); name a free port of this machine"
        ) from error
    listening.listen()
    return TCPStore(
        host,
        address.port,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listening.detach(),
    )


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
