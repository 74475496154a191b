"""One save, from the caller's tree to the commit.

save         `save` and `save_async`: the arguments and the caller's tree
tree_plan    names, plan and metadata of a tree, cached for its second save
snapshot     the values on the host
replicas     whether replicas differ
unchanged    what a step shares with earlier steps
job          one save from host memory to the commit, and where the processes meet
handle       what waits for a save
worker       the threads that save in the background, and the end of a program
"""
