"""What test_chart_learner_ranks.py starts in place of the learner: joins the group and prints rank, size and a sum."""

from nouscoder.learner.ranks import Ranks

ranks = Ranks.join("cpu", 120)
(total,) = ranks.sum([float(ranks.rank)])
print(ranks.rank, ranks.size, total, flush=True)
ranks.leave()
