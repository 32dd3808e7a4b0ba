"""Several machines: ranks, stages, a node with workers, learners; who is there and what they say to one another."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.peers.meet.address import Address
    from headrace.peers.meet.member import Member
    from headrace.peers.meet.of_rank import host_bytes_of_rank, take_gpu
    from headrace.peers.meet.proof import read_secret
    from headrace.peers.meet.ranks import Ranks
    from headrace.peers.meet.same_run import WORKERS_OWN
    from headrace.peers.node.planning import plan_workers
    from headrace.peers.node.report import ClusterReport
    from headrace.peers.node.run import serve
    from headrace.peers.node.working import deciding_options, work
    from headrace.peers.ranks.jobs import RankHelpers, answer_for
    from headrace.peers.ranks.planning import plan_ranks
    from headrace.peers.ranks.run import follow, resume_in_ranks, train_in_ranks
    from headrace.peers.stages.planning import plan_stages
    from headrace.peers.stages.run import Staging, follow_as_stage, resume_in_stages, train_in_stages
    from headrace.peers.which import plan_which

__getattr__ = lazy_face(__name__)
