"""What one of several processes that torchrun started takes of its machine."""

from headrace.machine.limits import usual_host_bytes
from headrace.terms.launch import Launch


def take_gpu(launch: Launch) -> bool:
    """Take this rank's GPU, if there are any; return whether there are."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
        return True
    return False


def host_bytes_of_rank(launch: Launch) -> int:
    """Return the host budget of a rank where none is given, and take its GPU."""
    return usual_host_bytes(pins=take_gpu(launch)) // launch.local_size
