"""How the bundled story model was made: from 4 MB of stories to a model of 5 million parameters, in nine minutes.

    python -m examples.train_stories --teacher DIR --corpus FILE --work DIR --out DIR

Four megabytes of text are too little for a language model: it has learned them by heart before it can write. So a
larger model, which has read much else, reads them first and then writes more of the same kind, and the small one learns
from both. This is distillation through text (sequence-level knowledge distillation, Kim and Rush 2016,
arXiv:1606.07947); that simple stories need so few parameters is the finding of TinyStories (Eldan and Li 2023,
arXiv:2305.07759). Five stages, a file each:

    split.py      the corpus, without the broken stories, in three parts; a vocabulary of 2,048 tokens
    teacher.py    fine-tune SmolLM2-135M on the real stories
    sample.py     let it write, with minillm's own engine, and throw away what is broken or copied
    train.py      train the small Llama from nothing on real and sampled stories
    evaluate.py   measure it with minillm on stories that nobody was trained on, and write its card

`stories.py` knows what a clean story is, `packing.py` makes blocks of tokens of them, `llama.py` is the model in plain
PyTorch, `fit.py` the training loop of both models. A stage leaves its result in the work directory and is not run again
if it is there; every stage has a budget of seconds and ends in time.
"""
