#!/bin/sh
# Take out what installed packages bring for those who change them: their tests, C++ headers and static libraries.
# In the same layer as the installation, or it would stay in the image all the same.
set -eu
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
find "$packages" -depth -type d \( -name tests -o -name test \) \
    \( -path '*/numpy/*' -o -path '*/pandas/*' -o -path '*/pyarrow/*' -o -path '*/scipy/*' -o -path '*/sklearn/*' \
    -o -path '*/sympy/*' -o -path '*/networkx/*' -o -path '*/matplotlib/*' -o -path '*/torch/*' -o -path '*/ray/*' \
    -o -path '*/greenlet/*' -o -path '*/Crypto/*' \) -exec rm -rf {} +
rm -rf "$packages/torch/include" "$packages/torch/share" "$packages/pyarrow/include" "$packages/Crypto/SelfTest"
find "$packages" -name '*.a' -delete
