"""What the runtime asks of its surroundings. Each Protocol is the whole of that surface."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch

from megatron_elas.runtime.communicator.membership import GroupMembers, Membership
from megatron_elas.runtime.verification.inspection import Inspection
from megatron_elas.spec.catalogue import Catalogue, StageContents
from megatron_elas.spec.errors import VerificationFailed
from megatron_elas.spec.events import WorkerLost
from megatron_elas.spec.migration import MigrationReport
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import RecoveryReport, SettleReport
from megatron_elas.spec.shards import ShardLayout
from megatron_elas.spec.transaction import Update


class Mirror(Protocol):
    """A copy of another worker's optimizer shard that follows its updates in place."""

    def apply(self, gradients: torch.Tensor, update: Update, settings: object) -> None:
        """Do to the copy what the owner does to its shard, with the same bits.

        Args:
            gradients: (P,) fp32, the owner's reduced gradients of the step; may be changed.
            update: What else the step's update depends on.
            settings: ``Host.update_settings()`` of the step: learning rate and the like.
        """


class Host(Protocol):
    """The training framework, as seen by one worker. Called on the main thread at a step boundary."""

    def read_shard(self, flat: torch.Tensor) -> None:
        """Copy the optimizer shard in use into ``flat`` (fp32, ``ShardLayout.flat_numel`` elements)."""

    def shard_reader(self) -> Callable[[torch.Tensor], None]:
        """``read_shard`` of the shard in use now: on any thread, and after a ``rebuild``, until it is updated."""

    def piece_reader(self, layout: ShardLayout) -> Callable[[torch.Tensor], None]:
        """As ``shard_reader``, of some whole pieces of the shard in use, laid out as a shard of their own."""

    def write_shard(self, flat: torch.Tensor) -> None:
        """Make ``flat`` the optimizer shard in use, and cast it into this worker's slice of the parameters."""

    def read_gradients(self, flat: torch.Tensor) -> None:
        """Copy the reduced gradients of the shard in use into ``flat`` ((P,), fp32)."""

    def apply_update(self, gradients: torch.Tensor, update: Update) -> None:
        """Finish what the optimizer has not done of a step's update, from the gradients as ``read_gradients`` gave
        them; without communication. May be called when it has begun already.
        """

    def conclude_step(self, step: int, captured: object, update: Update) -> object:
        """Do what the rest of the step's body, which was cut, would have done to counters and schedules.

        Args:
            step: Its update is applied.
            captured: ``capture()`` at its start.
            update: The step's.

        Returns:
            What the body would have returned.
        """

    def update_settings(self) -> object:
        """What an update depends on beside gradients and norm, as it is in the step under way."""

    def make_mirror(self, layout: ShardLayout, flat: torch.Tensor) -> Mirror:
        """A mirror of a shard of this layout, whose state is and stays in ``flat``."""

    def plan_groups(self, plan: ElasticPlan) -> Mapping[str, GroupMembers]:
        """The members of this worker's groups under the plan, by name. Changes nothing."""

    def follow_groups(self, plan: ElasticPlan) -> None:
        """Rewrite every rank and list of ranks of the framework to the groups, which have the plan's members now."""

    def describe_parameters(self) -> StageContents:
        """What this worker's stage holds, by global name, at launch."""

    def take_catalogue(self, catalogue: Catalogue) -> None:
        """What the whole model consists of, put together from what all workers hold. Called once, at launch."""

    def rebuild(self, plan: ElasticPlan) -> None:
        """Fit model, parameter buffers and optimizer to the plan, whose groups are edited already.

        With the same layers only what depends on the replicas changes; with others, or with more replicas than
        buffers have room for, model, buffers and optimizer are made anew, in the objects that everybody holds. On the
        same lane parameters that were here before and are here after keep their values; what the shard holds, and all
        other parameters, is undefined after.
        """

    def prebuild(self, plan: ElasticPlan, most: int = 1) -> bool:
        """Make what a later ``rebuild`` for this plan can use, such as modules of layers that come, and change nothing
        that is in use. Called at a step boundary; may be called again, for another plan, and is not undone.

        Args:
            plan: The later one.
            most: Layers to make in this call, which takes about so many times as long.

        Returns:
            Whether there is nothing left to make.
        """

    def forget_prebuilt(self) -> None:
        """Let go of what ``prebuild`` has made and no ``rebuild`` has used."""

    def begin_activity(self, activity: int) -> None:
        """Joint activity ``activity``, counted from 0, begins; the ones before it have ended for all.

        Note what runs around a step, an evaluation or a save: ``clear_step`` leaves it running.
        """

    def clear_step(self) -> None:
        """Forget what a cancelled activity left behind in buffers, handles and timers."""

    def sync_parameters(self, names: Collection[str] | None = None) -> None:
        """All-gather the parameters of the stage from their owners' slices; with ``names``, which are the same on all
        replicas, those at least.
        """

    def has_gathered(self, *, in_step: bool) -> bool:
        """Whether all gathers of parameters since the last update are over and went well. The last update is that of a
        step that has ended; gathers may be left to the next step, in whose forward or backward passes this worker is
        (``in_step``) or not.
        """

    def capture(self) -> object:
        """What ``rewind`` needs to run the step that begins now again: schedules and counters, no tensors."""

    def rewind(self, captured: object) -> None:
        """Go back to the start of the step at which ``captured`` was taken: data, learning rate, counters."""

    def catch_up(self, step: int) -> None:
        """Bring data, learning rate and counters to the start of ``step``, without a capture of it: this worker stands
        there already, or had no seat while others ran the steps since; then ``write_history`` follows.
        """

    def read_history(self) -> Sequence[int]:
        """What depends on how earlier steps went and not on their number alone, as it is before the next step: samples
        that the learning-rate schedule has seen (steps without an update do not count), and how losses are scaled.
        Equal on all workers, and of the same length.
        """

    def write_history(self, history: Sequence[int]) -> None:
        """Take over what ``read_history`` gave on another worker: this one had no seat while others ran steps."""

    def missed_step(self, step: int, update: Update | None) -> object:
        """What the training loop gets in place of the outcome of a step that ran while this worker had no seat.

        ``update``: of the step, where it was finished in the recovery that gave this worker a seat.
        """

    @property
    def checkpoint(self) -> int | None:
        """Iteration of the newest checkpoint of this job that is known to be complete. Looks at no disk."""

    def load_checkpoint(self, step: int) -> None:
        """Fill parameters, shard, schedules and counters from the checkpoint of iteration ``step``.

        Called by all seated workers, with buffers and an optimizer that fit the groups. Raises StateInvalid.
        """

    def inspect(self) -> Inspection:
        """Look at the state as it is now. Reads all parameters and the shard once. After a migration it is called on
        another thread, beside the passes of a step.
        """


class Announcement(Protocol):
    """A membership ended."""

    @property
    def epoch(self) -> int:
        """The epoch that begins."""

    @property
    def lost(self) -> Sequence[WorkerLost]:
        """Who is gone."""


class Order(Protocol):
    """How to go on."""

    @property
    def plan(self) -> ElasticPlan:
        """The new plan."""

    @property
    def settlement(self) -> Settlement:
        """From which state."""

    @property
    def base(self) -> ElasticPlan | None:
        """The plan in whose layout the state is; None when it is taken from a checkpoint."""

    @property
    def addresses(self) -> Mapping[int, str]:
        """Where everybody is."""


class Migration(Protocol):
    """To go over to another plan, without a loss."""

    @property
    def plan(self) -> ElasticPlan:
        """The new plan; its epoch is newer than that of the plan in force."""

    @property
    def addresses(self) -> Mapping[int, str]:
        """Where everybody is."""


class Control(Protocol):
    """This worker's line to the controller."""

    def progress(self, epoch: int, step: int) -> None:
        """What heartbeats say from now on."""

    def peer_unreachable(self, epoch: int, peer: int, detail: str) -> None:
        """A link broke while in use."""

    def leave_out(self, epoch: int, culprit: int, detail: str) -> None:
        """Ask for a new epoch without the activity under way, in which the worker ``culprit`` failed."""

    @property
    def latest_epoch(self) -> int:
        """Newest epoch announced so far. Set before the announcement cancels communication."""

    def copy_differed(self, epoch: int, owner: int, step: int, slot: str) -> None:
        """A copy kept here was not what its owner used before ``step``, and was replaced."""

    def unverified(self, epoch: int, error: VerificationFailed) -> None:
        """A check before resuming failed: ask for a new epoch with state from elsewhere."""

    def wait_quiesce(self, newer_than: int, *, idle: bool = False) -> Announcement:
        """Block until an epoch newer than ``newer_than`` is announced; the latest one. ``idle``: however long."""

    def settled(self, report: SettleReport) -> None:
        """Report the position at the step boundary."""

    def wait_recover(self, epoch: int) -> Order:
        """Block until the order for ``epoch``. Raises EpochChanged when a newer epoch is announced."""

    def recovered(self, report: RecoveryReport) -> None:
        """Report the first step finished after a recovery."""

    @property
    def migration(self) -> Migration | None:
        """The newest order to go over to another plan, unless a newer epoch was announced since."""

    def migrated(self, report: MigrationReport) -> None:
        """Report the first step finished under the plan of a migration."""

    def drained(self) -> None:
        """A migration has left this worker without a seat: it holds its old shard until it is told to leave, or gets a
        seat in a later epoch.
        """

    def declined(self, epoch: int, sentence: str) -> None:
        """This worker cannot go over to the plan of that epoch, and has not voted for the switch to it: the migration
        is dropped, and no further one is begun unasked. Training goes on as it does.
        """

    def finished(self, steps: int) -> None:
        """Training has reached its end, with so many steps done."""


class Groups(Protocol):
    """The process groups of this worker, all together (see communicator.Communicator)."""

    muted: bool
    tolerant: bool

    @property
    def pending_error(self) -> Exception | None:
        """First error that was passed over while ``tolerant``."""

    def clear_pending(self) -> None:
        """Forget it."""

    def drain(self) -> None:
        """Wait until no operation is in flight."""

    def edit(self, membership: Membership) -> None:
        """Enter an epoch with other members; see ``Communicator.edit``."""

    def open_links(self) -> None:
        """Make the links that groups will use and that are missing; see ``Communicator.open_links``."""

    def barrier(self) -> None:
        """Wait for all seated workers."""

    def all_gather_rows(self, row: Sequence[int]) -> list[list[int]]:
        """The row of every seated worker, in the order of ``Placement.workers``."""

    def all_gather_texts(self, text: str) -> list[str]:
        """The text of every seated worker, by ascending worker id."""


FaultPoint = Callable[[int, str, int | None], None]
"""Called with (step, phase, micro-batch) at every point where a fault script may strike."""
