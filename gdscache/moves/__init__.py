"""Moves of pages between tiers and planes, and their executors. See `gdscache.moves.base`."""

from gdscache.moves.base import PLANES as PLANES
from gdscache.moves.base import End as End
from gdscache.moves.base import Executor as Executor
from gdscache.moves.base import Lane as Lane
from gdscache.moves.base import Listener as Listener
from gdscache.moves.base import Move as Move
from gdscache.moves.base import Moving as Moving
from gdscache.moves.base import PageStatus as PageStatus
from gdscache.moves.base import PrefetchEnd as PrefetchEnd
from gdscache.moves.base import Priority as Priority
from gdscache.moves.base import Spent as Spent
from gdscache.moves.base import Steps as Steps
from gdscache.moves.base import Wait as Wait
from gdscache.moves.base import Way as Way
from gdscache.moves.base import failure as failure
