"""Who knows the secret: a challenge by HMAC-SHA256 in both directions, before anybody is given a rank.

It guards against mistakes, such as a worker of another run: torch.distributed neither authenticates nor encrypts, so a node
belongs on a private network.
"""

import hashlib
import hmac
import secrets
from pathlib import Path

from headrace.terms.errors import ConfigError

NONCE_BYTES = 16


def nonce() -> str:
    """Return a number that is used only once, as hexadecimal digits."""
    return secrets.token_hex(NONCE_BYTES)


def is_plain(word: str) -> bool:
    """Return whether somebody's word may be part of a key, as a nonce is."""
    return word.isascii() and word.isalnum() and len(word) <= 2 * NONCE_BYTES


def proof(secret: bytes, *words: str) -> str:
    """Return what only somebody who knows `secret` can compute for `words`."""
    return hmac.new(secret, "\n".join(words).encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def is_proof(given: str, secret: bytes, *words: str) -> bool:
    """Return whether `given` is the proof, in a time that reveals nothing about it."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), proof(secret, *words).encode())


def why_refused(is_proven: bool, version: str, own: str) -> str | None:
    """Return why somebody of a `version` is not let in, with or without a proof of the secret; None if they are."""
    if not is_proven:
        return "it does not have the secret; give all the same --secret FILE"
    if version != own:
        return f"it is headrace {version[:40]}, this is {own}; install the same version on all machines"
    return None


def read_secret(path: Path | None) -> bytes | None:
    """Return the content of the file with the secret.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        found = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"secret: {path}: cannot be read ({error.strerror}); give a file with the secret") from error
    if not found:
        raise ConfigError(f"secret: {path} is empty; put some random words into it, the same on each machine")
    return found
