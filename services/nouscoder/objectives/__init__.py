"""The objectives: one module each, with its settings, its formula and its source; and the parts that all share.

registry.py lists the objectives. base.py has what they get and return, loss.py joins the parts to one loss, and
aggregation.py, correction.py, advantage.py, reference_kl.py and entropy.py have one part each.

No module here imports torch: the formulas use the operators and methods of the tensors that they get. So settings and
formula stand in one file, and the configuration of every service loads the settings without a model library.
"""
