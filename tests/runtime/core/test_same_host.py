"""Messages in shared memory, against the bytes that were sent."""

from __future__ import annotations

import errno
import os
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.runtime.core import same_host
from gpipe_compiler.runtime.core.same_host import INLINE_BYTES, Peers
from gpipe_compiler.runtime.errors import TransportError

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="gloo brings messages on this system"
)

SOON = timedelta(seconds=20)


@pytest.fixture
def ends():
    """Ranks 0 and 1, in one process."""
    pair = ends_of()
    yield pair
    for end in pair:
        end.close()


def ends_of():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Peers({1: one}), Peers({0: other})


def bytes_of(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8)


def received(end, rank, tag, size):
    buffer = torch.zeros(size, dtype=torch.uint8)
    end.receive(buffer, rank, tag).wait(SOON)
    return buffer


SIZES = st.sampled_from([1, 7, INLINE_BYTES, INLINE_BYTES + 1, 5000, 40_000])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), messages=st.lists(st.tuples(SIZES, st.integers(0, 3)), max_size=12))
def test_messages_of_a_tag_arrive_in_order(data, messages):
    """Whatever was sent of other tags in between, and whenever the receiver looks."""
    one, other = ends_of()
    waiting = []
    for number, (size, tag) in enumerate(messages):
        payload = bytes_of(size, number)
        one.send(payload.clone(), 1, tag, 20.0)
        waiting.append((tag, payload))
        if data.draw(st.booleans()):
            take(other, waiting, data.draw(st.sampled_from(sorted({tag for tag, _ in waiting}))))
    while waiting:
        take(other, waiting, waiting[-1][0])
    one.close()
    other.close()


def take(end, waiting, tag):
    place = [other for other, _ in waiting].index(tag)
    _, payload = waiting.pop(place)
    assert torch.equal(received(end, 0, tag, payload.numel()), payload)


def test_memory_is_used_again(ends, monkeypatch):
    """Messages that are read one by one all lie in the same place."""
    made = []
    monkeypatch.setattr(
        same_host.os, "memfd_create", lambda *a, make=os.memfd_create: made.append(a) or make(*a)
    )
    for seed in range(50):
        payload = bytes_of(10_000 + seed, seed)
        ends[0].send(payload, 1, 0, 20.0)
        assert torch.equal(received(ends[1], 0, 0, payload.numel()), payload)
    assert len(made) == 1


def test_memory_for_messages_of_any_size_is_bounded(ends, monkeypatch):
    """As many pieces as messages are unread at once, none larger than the largest message."""
    made = []

    def kept(*args, make=os.memfd_create):
        made.append(os.dup(descriptor := make(*args)))
        return descriptor

    monkeypatch.setattr(same_host.os, "memfd_create", kept)
    sizes = [3000 + 7919 * turn % 60_000 for turn in range(60)]
    for start in range(0, len(sizes), 3):
        payloads = [bytes_of(size, size) for size in sizes[start : start + 3]]
        for payload in payloads:
            ends[0].send(payload, 1, 0, 20.0)
        for payload in payloads:
            assert torch.equal(received(ends[1], 0, 0, payload.numel()), payload)
    held = [os.fstat(descriptor).st_size for descriptor in made]
    for descriptor in made:
        os.close(descriptor)
    assert len(held) == 3
    assert max(held) <= max(sizes)


def test_a_message_is_read_into_the_memory_that_waits_for_it(ends):
    """Where its length is right; one that nobody expects so far is kept for who does."""
    buffer = torch.zeros(10_000, dtype=torch.uint8)
    coming = ends[1].receive(buffer, 0, 0)
    for seed in range(2):
        ends[0].send(bytes_of(10_000, seed), 1, 0, 20.0)
    coming.wait(SOON)
    assert torch.equal(buffer, bytes_of(10_000))
    assert torch.equal(received(ends[1], 0, 0, 10_000), bytes_of(10_000, 1))


def test_without_shared_memory_messages_come_in_pieces(ends, monkeypatch):
    def none(*_):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    for size in (INLINE_BYTES, INLINE_BYTES + 1, 40_000):
        ends[0].send(bytes_of(size), 1, size, 20.0)
    for size in (40_000, INLINE_BYTES, INLINE_BYTES + 1):
        assert torch.equal(received(ends[1], 0, size, size), bytes_of(size))


def test_what_is_sent_may_be_written_to(ends):
    payload = bytes_of(10_000)
    sent = payload.clone()
    ends[0].send(sent, 1, 0, 20.0)
    sent.zero_()
    assert torch.equal(received(ends[1], 0, 0, payload.numel()), payload)


def test_who_sends_waits_until_there_is_room_to_tell(ends):
    """Thousands of messages that nobody reads fill the socket; none gets lost."""
    count = 5000
    sender = threading.Thread(
        target=lambda: [ends[0].send(bytes_of(3, seed), 1, 0, 20.0) for seed in range(count)]
    )
    sender.start()
    for seed in range(count):
        assert torch.equal(received(ends[1], 0, 0, 3), bytes_of(3, seed))
    sender.join()


def test_two_that_send_and_read_late_do_not_wait_for_ever(ends):
    """Whoever waits for room takes in what comes."""
    count = 2000
    found = []

    def work(end, other):
        for seed in range(count):
            end.send(bytes_of(3, seed), other, 0, 20.0)
        same = [torch.equal(received(end, other, 0, 3), bytes_of(3, seed)) for seed in range(count)]
        found.append(all(same))

    threads = [threading.Thread(target=work, args=(ends[own], 1 - own)) for own in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert found == [True, True]


def test_what_was_sent_before_the_end_is_read(ends):
    ends[0].send(bytes_of(5000), 1, 0, 20.0)
    ends[0].close()
    assert torch.equal(received(ends[1], 0, 0, 5000), bytes_of(5000))
    with pytest.raises(RuntimeError, match="closed by the other end"):
        received(ends[1], 0, 0, 5000)
    with pytest.raises(RuntimeError, match="closed by the other end"):
        ends[1].send(bytes_of(5000), 0, 0, 20.0)


def test_what_was_sent_before_the_end_is_read_by_who_has_given_memory_back(ends):
    """Whoever leaves need not have heard all that came: memory of messages that were read."""
    one, other = ends
    for seed in range(2):
        one.send(bytes_of(5000, seed), 1, 0, 20.0)
    assert torch.equal(received(other, 0, 0, 5000), bytes_of(5000, 0))
    one.close()
    assert torch.equal(received(other, 0, 0, 5000), bytes_of(5000, 1))
    with pytest.raises(RuntimeError, match="closed by the other end"):
        received(other, 0, 0, 5000)


def test_who_may_have_no_more_descriptors_under_way_gives_up_in_time(ends, monkeypatch):
    """Though there is room in the socket."""

    def refused(*_):
        raise OSError(errno.ETOOMANYREFS, "too many references: cannot splice")

    monkeypatch.setattr(socket, "send_fds", refused)
    with pytest.raises(RuntimeError, match="timed out"):
        ends[0].send(bytes_of(5000), 1, 0, 0.05)


def test_nothing_comes(ends):
    buffer = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="timed out"):
        ends[1].receive(buffer, 0, 0).wait(timedelta(seconds=0.05))


def test_another_length_is_told(ends):
    ends[0].send(bytes_of(4), 1, 0, 20.0)
    with pytest.raises(RuntimeError, match="4 bytes came in place of 3"):
        received(ends[1], 0, 0, 3)


def test_closing_leaves_no_descriptor():
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends = same_host.Peers({1: one}), same_host.Peers({0: other})
        for seed in range(4):
            ends[0].send(bytes_of(10_000, seed), 1, 0, 20.0)
        for seed in range(4):
            assert torch.equal(received(ends[1], 0, 0, 10_000), bytes_of(10_000, seed))
        for end in ends:
            end.close()
    del ends, end  # and with them the memory
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_memory_that_is_kept_for_later_messages_has_a_bound(ends, monkeypatch):
    monkeypatch.setattr(same_host, "MOST_FREE_BYTES", 30_000)
    for tag in range(8):  # all on their way at once, and then all given back
        ends[0].send(bytes_of(10_000), 1, tag, 20.0)
    for tag in range(8):
        received(ends[1], 0, tag, 10_000)
    peer = ends[0]._peers[1]
    while peer.hear():
        pass

    assert sum(os.fstat(piece).st_size for piece in peer._free) == 30_000


def test_too_many_open_files_are_named_by_whoever_waits(ends, monkeypatch):
    coming = ends[1].receive(torch.zeros(10_000, dtype=torch.uint8), 0, 0)
    cut = (bytes(16), [], socket.MSG_CTRUNC, None)
    monkeypatch.setattr(socket, "recv_fds", lambda *_: cut)

    with pytest.raises(TransportError, match="too many open files") as caught:
        coming.wait(SOON)
    assert "ulimit -n" in caught.value.hint
