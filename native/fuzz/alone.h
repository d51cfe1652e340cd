// The functions of the core that work on one file alone.
#pragma once

#include "batch.h"

namespace headway::fuzz {

// What hw_seekable writes; empty where it refuses.
Bytes seekable(const Bytes& file);

// Gives a file to hw_probe, hw_splice and, now and then, hw_seekable, and checks what they answer.
void alone(const Exact& file, size_t place, Random& random);

}  // namespace headway::fuzz
