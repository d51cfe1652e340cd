// Mapped files that are cut while they are in use; see hw_guard.
#pragma once

namespace headway {

// Puts our handler of SIGBUS before any other.
void watch_faults();

}  // namespace headway
