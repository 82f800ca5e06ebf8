"""CUDA Graphs for a language model, as seven programs in reading order. README.md beside this file is their page."""
