"""One train step: accumulate microbatches, update, reduce over the mesh, dispatch."""
