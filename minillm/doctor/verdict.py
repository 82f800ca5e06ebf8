"""What the figures mean, in a sentence or two.

Two numbers decide. The *gain* is the time of an eager step over that of a replay: it is large where launching kernels
takes longer than running them. The *share of the read ceiling* says how close a step is to the least time in which its
bytes can be read at all (`bandwidth.py`): near 1 only fewer bytes make it faster. Which words are used where:

    gain   from 1.5 "graphs gain 2.0x", below "graphs gain 20 %", below 1.02 "graphs gain nothing"
    share  from 0.6 the model is bandwidth-bound, below its operations, one after the other, take the time
"""

FACTOR = 1.5  # from here on a gain is told as a factor
SOME = 1.1  # below, what bounds the model is said first
NOTHING = 1.02  # below, a gain is within what two runs differ by
BOUND = 0.6  # share of the read ceiling from which a step is bound by its bytes

FEWER_BYTES = "fewer bytes (a smaller dtype, quantisation) are what would help"


def gain_in_words(gain: float) -> str:
    if gain >= FACTOR:
        return f"graphs gain {gain:.1f}x here"
    if gain >= NOTHING:
        return f"graphs gain {gain - 1:.0%} here".replace("%", " %")
    return "graphs gain nothing here"


def verdict(eager_ms: float, graph_ms: float, share: float | None) -> str:
    """What graphs gain, and what bounds the step that is left.

    Args:
        share: of the read ceiling that a replay reaches, None if the ceiling is not known.
    """
    words = gain_in_words(eager_ms / graph_ms)
    if share is None:
        return f"{words}."
    if eager_ms / graph_ms < SOME and share >= BOUND:
        return f"this model is bandwidth-bound: {words}; {FEWER_BYTES}."
    return f"{words}; {_what_is_left(share, 'a replay')}."


def without_graphs(step_ms: float, share: float | None) -> str:
    """What can be said of a step that nothing is compared with."""
    words = f"a step takes {step_ms:.3g} ms"
    return f"{words}." if share is None else f"{words}; {_what_is_left(share, 'it')}."


def _what_is_left(share: float, what: str) -> str:
    reached = f"{what} reaches {share:.0%} of the read ceiling".replace("%", " %")
    if share >= BOUND:
        return f"{reached}, so from here {FEWER_BYTES}"
    return f"{reached}: its operations, one after the other, take the time, and not its bytes"
