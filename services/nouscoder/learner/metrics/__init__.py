"""What the learner reports: figures of a step, of the policy, and of the process."""
