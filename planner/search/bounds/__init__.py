"""Lower bounds of a step, from the cheapest to the closest: what no plan can beat, told before anything is solved.

On whole parts of a cluster: `parts`, from `splits`, `depth`, `ranks` and `least_work`. On single layouts: `layout`, and
where ranks differ `spread`, `filling` and `loads`. On layouts whose stages are dealt: `steady_state`, `first_gradient`,
`whole_layers`. On pairs of neighbouring stages: `round_trips`.
"""
