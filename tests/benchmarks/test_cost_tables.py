"""Tables of benchmarks that compare runs of the training command, from given figures."""

import pytest
import safeguards
import slow_links


def test_a_safeguard_is_compared_with_the_first_case_of_its_mesh() -> None:
    medians = dict.fromkeys(safeguards.CASES, 0.5)
    bases = {case.mesh: name for name, case in reversed(safeguards.CASES.items())}
    assert len(bases) == 2
    medians[bases[safeguards.FSDP]] = 0.25
    rows = {line[: max(map(len, medians))].strip(): line.split()[-3:] for line in safeguards.make_table(medians)[1:]}
    for name, case in safeguards.CASES.items():
        seconds, added, every_100 = rows[name]
        expected = 0.0 if case.mesh == safeguards.DATA or name == bases[safeguards.FSDP] else 1.0
        assert float(seconds) == medians[name]
        assert float(added.rstrip("%")) == pytest.approx(100 * expected)
        assert every_100 == (f"{expected / 100:.2%}" if case.has_interval else "-")


def test_a_curve_has_its_largest_ratio_to_the_first_one() -> None:
    curves = {
        "exact": {0: {100: 4.0, 200: 2.0}, 1: {100: 2.0, 200: 2.0}},
        "codes": {0: {100: 4.5, 200: 1.0}, 1: {100: 2.1, 200: 2.0}},
    }
    header, exact, codes = slow_links.format_curves(curves)[1:]
    assert header.split()[-4:] == ["100", "200", "largest", "ratio"]
    assert exact.split() == ["exact", "3.0000", "2.0000", "1.0000"]
    assert codes.split() == ["codes", "3.3000", "1.5000", "1.1000"]
