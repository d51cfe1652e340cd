// The Castagnoli checksum of records (RFC 3720, appendix B.4).
#pragma once

#include <cstddef>
#include <cstdint>

namespace headway {

uint32_t crc32c(const void* data, size_t size);

}  // namespace headway
