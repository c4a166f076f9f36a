#include "baseline.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace ffi_transport {
namespace {

Status broken() {
  return Status(Code::kPeerLost, std::string("the TCP stream broke: ") + std::strerror(errno));
}

bool send_all(int socket, const char* data, size_t length) {
  while (length > 0) {
    const ssize_t sent = ::send(socket, data, length, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    length -= static_cast<size_t>(sent);
  }
  return true;
}

bool receive_all(int socket, char* data, size_t length) {
  while (length > 0) {
    const ssize_t got = ::recv(socket, data, length, 0);
    if (got <= 0) return false;
    data += got;
    length -= static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

Status stream_send(int socket, const char* memory, const PageLists& pages, size_t page_bytes) {
  for (size_t i = 0; i < pages.source.size(); ++i) {
    uint64_t place = pages.destination[i];
    const char* page = memory + pages.source[i] * page_bytes;
    iovec parts[2] = {{&place, sizeof place}, {const_cast<char*>(page), page_bytes}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent < 0) return broken();
    size_t done = static_cast<size_t>(sent);
    if (done < sizeof place) {
      const char* rest = reinterpret_cast<const char*>(&place) + done;
      if (!send_all(socket, rest, sizeof place - done)) return broken();
      done = sizeof place;
    }
    done -= sizeof place;
    if (!send_all(socket, page + done, page_bytes - done)) return broken();
  }
  char answer;
  return receive_all(socket, &answer, 1) ? Status() : broken();
}

Status stream_receive(int socket, char* memory, uint64_t memory_pages, uint64_t count,
                      size_t page_bytes) {
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t place;
    if (!receive_all(socket, reinterpret_cast<char*>(&place), sizeof place)) return broken();
    if (place >= memory_pages) return Status(Code::kProtocol, "a page outside the buffer");
    if (!receive_all(socket, memory + place * page_bytes, page_bytes)) return broken();
  }
  const char answer = 1;
  return send_all(socket, &answer, 1) ? Status() : broken();
}

void copy_pages(const char* source, char* destination, const PageLists& pages, size_t page_bytes) {
  for (size_t i = 0; i < pages.source.size(); ++i) {
    std::memcpy(destination + pages.destination[i] * page_bytes,
                source + pages.source[i] * page_bytes, page_bytes);
  }
}

}  // namespace ffi_transport
