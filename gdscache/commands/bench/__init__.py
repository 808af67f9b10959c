"""`gdscache bench`: this machine against its own ceilings.

`commands.py` is the command line. A bench is a `Bench` of `kit.py`, which runs, keeps and shows it; its
figures, their tables and plots are of `figures.py`. Benches: `copy.py` (`copy_gpu.py`: what is copied, by CUDA),
`io.py`, `links.py`, `ttft.py` (`ttft_cells.py`: what is asked, `ttft_transformers.py`: the model), `serving.py`
(`serving_run.py`: inside an engine). `report.py` puts them on a page, and compares two reports.
"""
