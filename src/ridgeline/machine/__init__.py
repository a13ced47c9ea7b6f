"""What is known of a machine, number by number: measured, from datasheets, or written by people."""

from ridgeline.machine.contention import Overlap as Overlap
from ridgeline.machine.machine import Ceiling as Ceiling
from ridgeline.machine.machine import CodecTiming as CodecTiming
from ridgeline.machine.machine import Collective as Collective
from ridgeline.machine.machine import CurvePoint as CurvePoint
from ridgeline.machine.machine import Device as Device
from ridgeline.machine.machine import Direction as Direction
from ridgeline.machine.machine import Dispatch as Dispatch
from ridgeline.machine.machine import DispatchPhase as DispatchPhase
from ridgeline.machine.machine import Host as Host
from ridgeline.machine.machine import Link as Link
from ridgeline.machine.machine import Machine as Machine
from ridgeline.machine.machine import Operation as Operation
from ridgeline.machine.machine import OperatorTiming as OperatorTiming
from ridgeline.machine.machine import SizePoint as SizePoint
from ridgeline.machine.machine import StepCheck as StepCheck
from ridgeline.machine.machine import Workspace as Workspace
from ridgeline.machine.quantity import Quantity as Quantity
from ridgeline.machine.setting import Setting as Setting
