// What the transfer benchmark compares with: one plain TCP stream and memcpy, page by page. In C++,
// so that Python's own cost is no part of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packer.h"
#include "status.h"

namespace ffi_transport {

// Sends each source page behind the number of its destination page; returns when the receiver has
// said that all are in place.
Status stream_send(int socket, const char* memory, const PageLists& pages, size_t page_bytes);
// Receives `count` pages into their places, then says so. The buffer has `memory_pages` pages.
Status stream_receive(int socket, char* memory, uint64_t memory_pages, uint64_t count,
                      size_t page_bytes);
void copy_pages(const char* source, char* destination, const PageLists& pages, size_t page_bytes);

}  // namespace ffi_transport
