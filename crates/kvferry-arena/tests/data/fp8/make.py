"""Makes e4m3fn.txt: the fp8 e4m3fn code of every bf16 number, as the package ml_dtypes rounds it. Where the code
changes with the next bf16 bits there is a line with these bits and the code. ml_dtypes makes a NaN of what is too large;
a cache saturates, so sizes are cut to 448 before. Needs: pip install ml_dtypes numpy. Deterministic."""

import ml_dtypes
import numpy as np

bits = np.arange(1 << 16, dtype=np.uint32)
values = (bits << 16).astype(np.uint32).view(np.float32)
with np.errstate(invalid="ignore"):
    codes = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
changes = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
with open("e4m3fn.txt", "w") as out:
    out.writelines(f"{bits[i]:04x} {codes[i]:02x}\n" for i in changes)
