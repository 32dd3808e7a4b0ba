"""Learners that train by themselves and meet at a node now and then: DiLoCo, with the members of Decoupled DiLoCo."""
