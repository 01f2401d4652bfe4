"""Effects of signals, tested within this process."""

import signal

import pytest

from jaxopt_llm.observe.preemption import Preemption

BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("sent", BOTH, ids=lambda sent: sent.name)
def test_the_first_signal_is_recorded_and_the_second_ends_the_process(sent: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in BOTH}
    with Preemption() as preemption:
        assert signal.getsignal(sent) is not before[sent]
        assert not preemption.requested()
        signal.raise_signal(sent)
        assert preemption.requested()
        assert [signal.getsignal(each) for each in BOTH] == [signal.SIG_DFL] * 2
    assert {each: signal.getsignal(each) for each in BOTH} == before
