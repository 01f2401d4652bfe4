"""Messages of the one protocol between the processes of a job."""

import socket

import pytest

from jaxopt_llm.distributed.wire import NotTrustedError, Peer

pytestmark = pytest.mark.core


def make_pair(token: bytes = b"secret") -> tuple[Peer, Peer]:
    """Return the two ends of a connection that know each other's nonce."""
    ends = socket.socketpair()
    accepts, calls = Peer(ends[0], b"secret", accepted=True), Peer(ends[1], token)
    assert accepts.receive() == calls.receive() == []
    return accepts, calls


def test_signed_messages_arrive_in_both_directions() -> None:
    first, second = make_pair()
    for number in range(3):
        first.send({"number": number})
        first.send()
    second.send({"back": 1, "nested": {"b": [1.5, None], "a": {"1": "ü"}}})
    assert second.receive() == [{"number": number} for number in range(3)]
    assert first.receive() == [{"back": 1, "nested": {"b": [1.5, None], "a": {"1": "ü"}}}]


def test_messages_of_a_process_with_another_token_are_not_accepted() -> None:
    first, second = make_pair(b"guess")
    for sender, receiver in ((first, second), (second, first)):
        sender.send({"number": 3})
        with pytest.raises(NotTrustedError):
            receiver.receive()


@pytest.mark.parametrize("how", ["changed", "repeated", "sent back", "on another connection"])
def test_a_message_counts_once_and_for_one_end(how: str) -> None:
    first, second = make_pair()
    first.send({"number": 3})
    line = second.connection.recv(4096)
    if how == "changed":
        line = line.replace(b'"number": 3', b'"number": 4')
    elif how == "repeated":
        line += line
    elif how == "sent back":
        first, second = second, first
    else:
        first, second = make_pair()
    first.connection.sendall(line)
    with pytest.raises(NotTrustedError):
        second.receive()


def test_a_message_is_not_accepted_by_its_sender_whose_nonce_the_other_end_repeats() -> None:
    """The other end has no token, and sends back what it receives."""
    own, other = socket.socketpair()
    peer = Peer(own, b"secret")
    other.sendall(other.recv(4096))
    assert peer.receive() == []
    peer.send({"number": 3})
    other.sendall(other.recv(4096))
    with pytest.raises(NotTrustedError):
        peer.receive()


@pytest.mark.parametrize("sent", [[1], 1, "text"])
def test_a_message_is_an_object(sent: object) -> None:
    first, second = make_pair()
    first.send(sent)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a message"):
        second.receive()


def test_poll_returns_no_message_when_none_has_come_and_none_after_garbage() -> None:
    first, second = make_pair()
    second.connection.settimeout(0.01)
    assert second.poll() == []
    first.connection.sendall(b"garbage\n")
    assert second.poll() is None
