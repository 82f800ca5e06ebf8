"""All programs of the story, in reading order.

python -m examples.story
python -m examples.story --json examples/results/h200-story.json
"""

import sys

from . import s1_loop, s2_capture, s3_inputs, s4_batches, s5_prefill, s6_edit, s7_many_steps
from .tell import main

PROGRAMS = (s1_loop, s2_capture, s3_inputs, s4_batches, s5_prefill, s6_edit, s7_many_steps)

if __name__ == "__main__":
    sys.exit(main("examples.story", "The programs of the story, in reading order.", [p.measure for p in PROGRAMS]))
