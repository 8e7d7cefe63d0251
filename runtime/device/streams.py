"""The streams of a card that a program computes on.

Nearly always it is one, whose own order keeps everything right, and next to nothing is done here. With more of them,
plain PyTorch lets a program rely on what autograd saves to live until backward: a stream may go on reading a tensor
that was made on another. Delta lets go of it sooner, and copies, encodes and replays at moments that the program does
not know of. So what Delta does comes after all that the streams have been given until then, and what it lets go of is
not used again before all of them have got there.
"""

import torch

from delta.runtime.device.accelerator import Accelerator, Stream


class ComputeStreams:
    """The streams that were current when the program was seen to compute. Safe in several threads: streams are only
    ever added.
    """

    def __init__(self, card: Accelerator) -> None:
        self._card = card
        self._seen: dict[int, Stream] = {}

    def note(self) -> None:
        """The program computes on the caller's current stream."""
        handle = self._card.current_handle()
        if handle not in self._seen:
            self._seen[handle] = self._card.current_stream()

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return len(self._seen) > 1

    @property
    def only_here(self) -> bool:
        """Whether the caller's current stream is the only one."""
        return len(self._seen) == 1 and self._card.current_handle() in self._seen

    def lead(self, follower: Stream) -> None:
        """What `follower` is given from now on comes after all that the caller's current stream and those seen have
        been given.
        """
        leaders = list(self._seen.values())
        if (current := self._card.current_stream()) not in leaders:
            leaders.append(current)
        for leader in leaders:
            reached = self._card.new_event()
            reached.record(leader)
            follower.wait_event(reached)

    def meet(self) -> None:
        """What the caller's current stream is given from now on comes after all that the others have been given."""
        self.note()
        if self.several:
            self.lead(self._card.current_stream())

    def share(self, storage: torch.UntypedStorage) -> None:
        """Any of the streams may be using the storage: its memory is not to be used again before all have got to where
        they are when its last owner drops it.
        """
        for stream in list(self._seen.values()):
            self._card.share_with(storage, stream)
