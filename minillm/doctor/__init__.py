"""`python -m minillm.doctor`: does this model run right on this machine, and what do CUDA graphs gain here?

It takes a model as `LLM` has it, with its cache, its kernels and its captured steps, looks at it from outside, and
prints a report. Nothing is computed a second way but the reference that results are held against.

    examination.py  the order of everything, on a GPU and without one
    patient.py      what is examined
    checks.py       a replay is the eager step; addresses stay; no synchronisation; memory comes back
    accuracy.py     decode steps and prefill against float32
    timing.py       the time of a step, and a trace of some
    busy.py         from a trace to what the GPU did: kernels, and when it was idle
    verdict.py      what the figures mean, in a sentence
    text.py         the report

A check that fails makes the exit status 1. What cannot be checked is named, with the reason, and fails nothing.
"""
