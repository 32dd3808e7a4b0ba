"""Sending what a run gave to the Hugging Face Hub. The Hub's own library finds the token, and skips files that are there.

Invariant: whether there is a token, and whether the Hub takes it, is asked before anything is written.
"""

from pathlib import Path

from headrace.files.hub import HUB_SECONDS, hub_answers, is_name
from headrace.terms.errors import ConfigError, ExportFailed, in_one_line


def refuse_unpushable(name: str) -> None:
    """Refuse to send to OWNER/NAME if that is no name, or the Hub does not answer or does not know who asks.

    Raises:
        ConfigError: it cannot be sent there.
    """
    from huggingface_hub import HfApi, get_token  # late: most exports stay here

    if not is_name(name):
        raise ConfigError(f"push_to_hub: {name!r} is no name on the Hub; give OWNER/NAME; nothing was written")
    if get_token() is None:
        raise ConfigError("push_to_hub: there is no token of the Hub here; log in with `hf auth login`; nothing was written")
    if not hub_answers(name):
        raise ConfigError(
            f"push_to_hub: the Hub did not answer within {HUB_SECONDS:g} seconds; try again with a network, or leave "
            "--push-to-hub out; nothing was written"
        )
    try:
        HfApi().whoami()
    except Exception as error:  # a refusal is the library's own error; a lost connection is one of those below it
        raise ConfigError(
            f"push_to_hub: the Hub does not take the token ({in_one_line(error)}); log in with `hf auth login`, or try again; "
            "nothing was written"
        ) from error


def push_to_hub(out: Path, name: str, *, private: bool) -> str:
    """Send a directory, or one file, to the model OWNER/NAME, which is made if it is not there; return its address.

    Files that came whole the last time are not sent again.

    Raises:
        ExportFailed: it was refused, or broke off. `out` stays as it is.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        address = str(hub.create_repo(name, private=private, exist_ok=True))
        if out.is_dir():
            hub.upload_folder(repo_id=name, folder_path=out, commit_message="Exported by headrace")
        else:
            hub.upload_file(repo_id=name, path_or_fileobj=out, path_in_repo=out.name, commit_message="Exported by headrace")
    except Exception as error:  # the Hub's library and those below it have an error for each thing
        again = "the same command sends it again" if out.is_dir() else f"`hf upload {name} {out}` sends it again"
        raise ExportFailed(
            f"push_to_hub: {name} was not sent whole ({type(error).__name__}: {in_one_line(error)}). {out} is whole; {again}"
        ) from error
    return address
