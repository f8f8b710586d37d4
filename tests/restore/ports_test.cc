// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The ports of librdmacm that a restored task holds until its library takes them, over a kernel that is this test.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <rdma/rdma_user_cm.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <string>
#include <vector>

#include "said.h"

namespace {

/// What was asked of the device.
struct Device {
  int fd = -1, missing = 0;
  int taken = 0;  ///< this port
  std::vector<std::string> done;
};
Device device;

template <class T>
T body(const void* packet) {
  T t;
  std::memcpy(&t, static_cast<const char*>(packet) + sizeof(rdma_ucm_cmd_hdr), sizeof(t));
  return t;
}

ssize_t refused(int error) {
  errno = error;
  return -1;
}

std::string text_of(const sockaddr_storage& at, int& port) {
  char text[INET6_ADDRSTRLEN] = "";
  const auto& in = reinterpret_cast<const sockaddr_in&>(at);
  const auto& in6 = reinterpret_cast<const sockaddr_in6&>(at);
  port = ntohs(in.sin_port);
  inet_ntop(at.ss_family, at.ss_family == AF_INET ? static_cast<const void*>(&in.sin_addr) : &in6.sin6_addr, text, sizeof(text));
  return std::string(text) + " " + std::to_string(port);
}

ssize_t carry_out(const void* packet, std::size_t bytes) {
  rdma_ucm_cmd_hdr header;
  std::memcpy(&header, packet, sizeof(header));
  EXPECT_EQ(bytes, sizeof(header) + header.in);
  int port = 0;
  switch (header.cmd) {
    case RDMA_USER_CM_CMD_CREATE_ID: {
      const auto c = body<rdma_ucm_create_id>(packet);
      EXPECT_EQ(header.out, sizeof(rdma_ucm_create_id_resp));
      reinterpret_cast<rdma_ucm_create_id_resp*>(c.response)->id = 5;
      device.done.push_back("id of " + std::to_string(c.ps));
      break;
    }
    case RDMA_USER_CM_CMD_SET_OPTION: {
      const auto c = body<rdma_ucm_set_option>(packet);
      EXPECT_EQ(c.id, 5u);
      EXPECT_EQ(c.level, std::uint32_t{RDMA_OPTION_ID});
      EXPECT_EQ(*reinterpret_cast<const int*>(c.optval), 1);
      device.done.push_back("option " + std::to_string(c.optname));
      break;
    }
    case RDMA_USER_CM_CMD_BIND: {
      const auto c = body<rdma_ucm_bind>(packet);
      EXPECT_EQ(c.id, 5u);
      sockaddr_storage at;
      std::memcpy(&at, &c.addr, sizeof(at));
      EXPECT_EQ(c.addr_size, at.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
      device.done.push_back("bind " + text_of(at, port));
      if (port == device.taken) return refused(EADDRNOTAVAIL);
      break;
    }
    default: return refused(ENOSYS);
  }
  return static_cast<ssize_t>(bytes);
}

}  // namespace

extern "C" {
int open(const char* path, int flags, ...) {
  std::va_list more;
  va_start(more, flags);
  const int mode = va_arg(more, int);
  va_end(more);
  if (std::strcmp(path, "/dev/infiniband/rdma_cm")) return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
  if (device.missing) return static_cast<int>(refused(device.missing));
  return device.fd = eventfd(0, 0);
}
ssize_t write(int fd, const void* buf, std::size_t bytes) { return fd == device.fd ? carry_out(buf, bytes) : syscall(SYS_write, fd, buf, bytes); }
}

namespace {

class Ports : public ::testing::Test {
 protected:
  void SetUp() override {
    device = {};
    said.clear();
    process_.pid = 4711;
  }
  void TearDown() override {
    if (device.fd >= 0) close(std::exchange(device.fd, -1));
  }
  migr_rst_process* with(std::vector<migr_fd_desc> fds) {
    fds_ = std::move(fds);
    process_.fds = fds_.data();
    process_.nr_fds = static_cast<std::uint32_t>(fds_.size());
    return &process_;
  }
  static migr_fd_desc of_kind(std::uint32_t kind) {
    migr_fd_desc d{};
    d.kind = kind;
    d.fd = -1;
    return d;
  }
  static migr_fd_desc port(std::uint32_t number, std::uint32_t family = AF_INET, std::uint64_t options = 0) {
    migr_fd_desc d = of_kind(MIGR_FD_CM_PORT);
    d.obj_type = RDMA_PS_TCP;
    d.obj_handle = number;
    d.ring = family;
    d.pgoff = options;
    return d;
  }

  migr_rst_process process_{};
  std::vector<migr_fd_desc> fds_;
};

TEST_F(Ports, AreHeldWithTheirOptions) {
  migr_fd_desc there = port(7, AF_INET6, 1u << RDMA_OPTION_ID_REUSEADDR | 1u << RDMA_OPTION_ID_AFONLY);
  in6_addr loopback = IN6ADDR_LOOPBACK_INIT;
  std::memcpy(&there.addr, &loopback, 8);
  std::memcpy(&there.bytes, loopback.s6_addr + 8, 8);
  EXPECT_GE(ports_hold(with({of_kind(MIGR_FD_CM), port(4712), of_kind(MIGR_FD_CONTEXT), there})), 0) << said;
  EXPECT_EQ(device.done, (std::vector<std::string>{"id of 262", "bind 0.0.0.0 4712", "id of 262", "option 1", "option 2", "bind ::1 7"}));
}

TEST_F(Ports, OneThatIsTakenIsNamed) {
  device.taken = 4712;
  EXPECT_EQ(ports_hold(with({of_kind(MIGR_FD_CM), port(4711), port(4712)})), -1);
  EXPECT_NE(said.find("pid 4711 has port 4712 of librdmacm"), said.npos) << said;
  EXPECT_NE(said.find(std::strerror(EADDRINUSE)), said.npos) << said;
  EXPECT_EQ(fcntl(std::exchange(device.fd, -1), F_GETFD), -1) << "its file is left open";
}

TEST_F(Ports, WithoutTheDeviceItIsSaidAhead) {
  migr_rst_err err{};
  device.missing = ENOENT;
  EXPECT_EQ(ports_look(with({of_kind(MIGR_FD_CONTEXT)}), &err), 0) << "who does not use librdmacm does not need it";
  EXPECT_EQ(ports_look(with({of_kind(MIGR_FD_CONTEXT), of_kind(MIGR_FD_CM)}), &err), -ENOENT);
  EXPECT_NE(std::strstr(err.text, "load rdma_ucm"), nullptr) << err.text;
  EXPECT_EQ(ports_hold(with({of_kind(MIGR_FD_CM)})), -1);
  EXPECT_NE(said.find("rdma_cm cannot be opened"), said.npos) << said;
  device.missing = 0;
  EXPECT_EQ(ports_look(with({of_kind(MIGR_FD_CM)}), &err), 0);
}

}  // namespace
