"""Names for the integers that cross folders.

``WorkerId`` is fixed for a worker's life; its rank in any group is not. ``Epoch`` counts
memberships: every change of who takes part starts a new one.
"""

WorkerId = int
Epoch = int
Step = int
