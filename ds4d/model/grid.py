"""The grid of IQ2_XXS: 256 runs of eight magnitudes, each 8, 25 or 43 (spec/model.md 3).

A constant of the format that no formula gives. Stored as one 16-bit code a run, two bits an
element from the lowest on; the codes increase strictly. A test holds their sha256.
"""

from __future__ import annotations

import base64

import numpy as np

_CODES = (
    "000621po*D3IGuR6aXLqA^<1=DgZ$ML;z3#SO8%FWB`Bwf&hvDq5uH_1OX5M6#+m2gaMcV00II6A_9T}"
    "0R#jD5CkCvBm_VNLIg+zU<82#ganWTqyzv30tE;KAO%JRX$61<kp&3`5C%X7ga)Jr00;#L2nZAiC<s9a"
    "L<mp_QV56$1PMS10tyrg0T2Wb5D*~{KoDRMgb<Jrl@I_C2oWF=P!U=YfDt4TMG^oM2oxX`B@{^%fD{-N"
    "Vif=u78U^*1Q-w)Kp24-02u`tpczpb03ZS&3Lr!vVIY7Yf*>g&NFe|s0wMt<1SAk7KqOWq03|^sWF?R$"
    "2q+*Zlqf_h0YC&m5I`6}AwVQRKtM=9RzP4tfk1>nkU#)IAVFb4fI)>p0YVT$NJ3UZXhHx)2t*)6fJB)@"
    "5=A6M07d~w1V|7_KuASM07+O$VM&5XMM{uL08j`}5l|UWAW(o%h)@JkLQ$kqky4OUl2i&+0ajF209X-N"
    "8CYakKv@V{1Yi(gKwxNK0AW>O7-C>z0AvMZ5M>f&gk?f#0DuC33V=a?f`9~p7=b{65rP4P1cVTT6@);9"
    "V1xjLMun7x35Gz1V1@#S1c?!f1dtGrB#=Omp^z4lfRRO#0F)w>M3hmLftVnf0-#W!g`f$c0HPSAP^bi{"
)

CODES = np.frombuffer(base64.b85decode(_CODES), "<u2")
"""[256] u16, for where 512 bytes of table are better than 2,048."""

GRID = np.array([8, 25, 43], np.uint8)[CODES[:, None] >> np.arange(0, 16, 2) & 3]
"""[256, 8] u8."""

SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)
"""[128] u8: seven stored sign bits to eight, the last making the number of minuses even."""
