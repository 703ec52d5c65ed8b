"""Which layers make which stage, and which of them recompute: one layout, solved.

`inside` finds the best stage map where there is one stage per rank: `windows`, `segments`, `lanes` and `paths` say what
is possible, `stages` chooses by CP-SAT, `recompute` and `knapsack` fit the memory. `dealt` and its neighbours follow
the rule of `dealing` where several stages share a rank; `synthesized` makes the order of micro-batches too.
"""
