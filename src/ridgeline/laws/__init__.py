"""The quantitative laws of parallel computing: floats in, floats out.

Roofline, Amdahl and his successors, pipelining, the cost of collective operations, links that are shared, and
the slowest of several.
"""

from ridgeline.laws.amdahl import amdahl as amdahl
from ridgeline.laws.amdahl import amdahl_limit as amdahl_limit
from ridgeline.laws.amdahl import gustafson as gustafson
from ridgeline.laws.amdahl import karp_flatt as karp_flatt
from ridgeline.laws.amdahl import usl as usl
from ridgeline.laws.amdahl import usl_peak as usl_peak
from ridgeline.laws.collectives import all_gather_seconds as all_gather_seconds
from ridgeline.laws.collectives import broadcast_seconds as broadcast_seconds
from ridgeline.laws.collectives import bus_bandwidth_factor as bus_bandwidth_factor
from ridgeline.laws.collectives import parameter_server_seconds as parameter_server_seconds
from ridgeline.laws.collectives import reduce_scatter_seconds as reduce_scatter_seconds
from ridgeline.laws.collectives import ring_all_reduce_seconds as ring_all_reduce_seconds
from ridgeline.laws.collectives import tree_all_reduce_seconds as tree_all_reduce_seconds
from ridgeline.laws.fair_sharing import Flow as Flow
from ridgeline.laws.fair_sharing import fair_finish_seconds as fair_finish_seconds
from ridgeline.laws.fair_sharing import fair_rates as fair_rates
from ridgeline.laws.fits import AmdahlFit as AmdahlFit
from ridgeline.laws.fits import GustafsonFit as GustafsonFit
from ridgeline.laws.fits import USLFit as USLFit
from ridgeline.laws.fits import fit_amdahl as fit_amdahl
from ridgeline.laws.fits import fit_gustafson as fit_gustafson
from ridgeline.laws.fits import fit_usl as fit_usl
from ridgeline.laws.intensity import data_parallel_bytes as data_parallel_bytes
from ridgeline.laws.intensity import model_parallel_bytes as model_parallel_bytes
from ridgeline.laws.intensity import samples_of_equal_bytes as samples_of_equal_bytes
from ridgeline.laws.intensity import wire_intensity as wire_intensity
from ridgeline.laws.order_statistics import slowest_of as slowest_of
from ridgeline.laws.pipelining import pipeline_bubble as pipeline_bubble
from ridgeline.laws.pipelining import pipeline_seconds as pipeline_seconds
from ridgeline.laws.pipelining import pipelined_parallel_fraction as pipelined_parallel_fraction
from ridgeline.laws.pipelining import pipelined_seconds as pipelined_seconds
from ridgeline.laws.pipelining import pipelined_speedup as pipelined_speedup
from ridgeline.laws.pipelining import prefetched_step_seconds as prefetched_step_seconds
from ridgeline.laws.resampling import interval as interval
from ridgeline.laws.resampling import resampled as resampled
from ridgeline.laws.roofline import ridge_point as ridge_point
from ridgeline.laws.roofline import roofline as roofline
from ridgeline.laws.roofline import roofline_seconds as roofline_seconds
