"""Several machines: ranks, stages, a node with workers, learners; who is there and what they say to one another."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.peers.meet.address import Address as Address
    from headrace.peers.meet.member import Member as Member
    from headrace.peers.meet.of_rank import host_bytes_of_rank as host_bytes_of_rank
    from headrace.peers.meet.of_rank import take_gpu as take_gpu
    from headrace.peers.meet.proof import read_secret as read_secret
    from headrace.peers.meet.ranks import Ranks as Ranks
    from headrace.peers.meet.same_run import WORKERS_OWN as WORKERS_OWN
    from headrace.peers.node.planning import plan_workers as plan_workers
    from headrace.peers.node.report import ClusterReport as ClusterReport
    from headrace.peers.node.report import explain_cluster as explain_cluster
    from headrace.peers.node.run import serve as serve
    from headrace.peers.node.working import deciding_options as deciding_options
    from headrace.peers.node.working import work as work
    from headrace.peers.ranks.jobs import RankHelpers as RankHelpers
    from headrace.peers.ranks.jobs import answer_for as answer_for
    from headrace.peers.ranks.planning import plan_ranks as plan_ranks
    from headrace.peers.ranks.run import follow as follow
    from headrace.peers.ranks.run import resume_in_ranks as resume_in_ranks
    from headrace.peers.ranks.run import train_in_ranks as train_in_ranks
    from headrace.peers.stages.planning import plan_stages as plan_stages
    from headrace.peers.stages.run import Staging as Staging
    from headrace.peers.stages.run import follow_as_stage as follow_as_stage
    from headrace.peers.stages.run import resume_in_stages as resume_in_stages
    from headrace.peers.stages.run import train_in_stages as train_in_stages
    from headrace.peers.which import plan_which as plan_which

__getattr__ = lazy_face(__name__)
