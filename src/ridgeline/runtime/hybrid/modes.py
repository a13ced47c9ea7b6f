"""The execution modes as the runtime reads them; the table itself needs no torch and lies lower."""

from ridgeline.execution import MODES as MODES
from ridgeline.execution import ONLY_FOR as ONLY_FOR
from ridgeline.execution import Form as Form
from ridgeline.execution import Mode as Mode
from ridgeline.execution import Purpose as Purpose
from ridgeline.execution import check_alone as check_alone
from ridgeline.execution import check_offered as check_offered
from ridgeline.execution import offered as offered
