"""Who knows the secret: a challenge by HMAC-SHA256, both ways, before anybody is given a rank.

It guards against mistakes, such as a worker of another run: torch.distributed neither authenticates nor encrypts, so a node
belongs on a private network.
"""

import hashlib
import hmac
import secrets

NONCE_BYTES = 16


def nonce() -> str:
    """Return a number that is used once, as hexadecimal digits."""
    return secrets.token_hex(NONCE_BYTES)


def proof(secret: bytes, *words: str) -> str:
    """Return what only who knows `secret` can say about `words`."""
    return hmac.new(secret, "\n".join(words).encode(), hashlib.sha256).hexdigest()


def is_proof(given: str, secret: bytes, *words: str) -> bool:
    """Return whether `given` is the proof, in time that says nothing about it."""
    return hmac.compare_digest(given.encode(), proof(secret, *words).encode())
