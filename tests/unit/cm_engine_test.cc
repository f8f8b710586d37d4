/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * librdmacm's ids over a kernel that is this test: what the application is told before, in and after a migration. Commands
 * are written as librdmacm writes them.
 */
#include "../../libmigr/cm/engine.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <thread>

#include "../../libmigr/cm/events.h"

namespace migr::cm {
namespace {

constexpr int kBacklog = 3;

/// A device: commands are answered at once, events when the test says so.
struct FakeKernel {
  struct Id {
    std::uint64_t uid;
    std::uint64_t node_guid;
    std::uint32_t reported = 0;
    rdma_ucm_conn_param param{};
    std::string done{};
  };
  std::mutex lock;
  int fd = -1;
  int opened = 0;
  std::uint64_t node_guid = 0;  ///< of new ids' device; 0: none
  Instance refused_by{};  ///< by the last refusal
  std::uint32_t next = 5;
  std::map<std::uint32_t, Id> ids;
  std::deque<rdma_ucm_event_resp> events;
  std::uint16_t port = 4711;
  std::array<std::uint8_t, 16> address{};  ///< of version 6; none: any of version 4
  pid_t opener = 0, writer = 0, reader = 0, stranger = 0;
  int refuse = -1;  ///< this command, with EINVAL
  bool only_v4 = false;
  sockaddr_storage bound{}, resolved{};  ///< by the last such command
  bool gone = false;  ///< the device
  int written = 0, asked = 0;

  Kernel calls() {
    return {[this] {
              std::lock_guard guard(lock);
              ids.clear();
              events.clear();
              opened++;
              opener = gettid();
              if (gone) return -ENOENT;
              return fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
            },
            [this](int to, const void* command, std::size_t bytes) { return write(to, static_cast<const char*>(command), bytes); }};
  }
  void ready() {
    const std::uint64_t one = 1;
    (void)!::write(fd, &one, sizeof(one));
  }
  void tell(rdma_ucm_event_resp event) {
    std::lock_guard guard(lock);
    events.push_back(event);
    ready();
  }
  /// An event of a kernel's id.
  void tell(std::uint32_t id, std::uint32_t what, std::uint32_t status = 0, const void* data = nullptr, std::size_t bytes = 0) {
    rdma_ucm_event_resp e{};
    {
      std::lock_guard guard(lock);
      e.uid = ids.at(id).uid;
    }
    e.id = id;
    e.event = what;
    e.status = status;
    if (data) memcpy(e.param.conn.private_data, data, bytes);
    e.param.conn.private_data_len = static_cast<std::uint8_t>(bytes);
    tell(e);
  }
  /// Somebody connects to a listening one. @return the new id's number
  std::uint32_t request(std::uint32_t listener, const void* data = nullptr, std::size_t bytes = 0) {
    rdma_ucm_event_resp e{};
    {
      std::lock_guard guard(lock);
      e.uid = ids.at(listener).uid;
      e.id = next++;
      ids[e.id] = {0, node_guid};
    }
    e.event = RDMA_CM_EVENT_CONNECT_REQUEST;
    e.param.conn.qp_num = 77;
    if (data) memcpy(e.param.conn.private_data, data, bytes);
    e.param.conn.private_data_len = static_cast<std::uint8_t>(bytes);
    tell(e);
    return e.id;
  }
  std::string done(std::uint32_t id) {
    std::lock_guard guard(lock);
    return ids.contains(id) ? ids[id].done : "gone";
  }
  /// The newest id that exists.
  std::uint32_t newest() {
    std::lock_guard guard(lock);
    return ids.empty() ? 0 : ids.rbegin()->first;
  }
  std::size_t count() {
    std::lock_guard guard(lock);
    return ids.size();
  }
  /// The thread that has asked for events.
  pid_t last_reader() {
    std::lock_guard guard(lock);
    return reader;
  }
  /// Events that were not read.
  std::size_t waiting() {
    std::lock_guard guard(lock);
    return events.size();
  }
  /// Written so far, but for those that read events.
  int commands() {
    std::lock_guard guard(lock);
    return written;
  }

  ssize_t write(int to, const char* command, std::size_t bytes) {
    std::lock_guard guard(lock);
    EXPECT_EQ(to, fd);
    writer = gettid();
    rdma_ucm_cmd_hdr header;
    memcpy(&header, command, sizeof(header));
    EXPECT_EQ(header.in + sizeof(header), bytes);
    const char* body = command + sizeof(header);
    const auto fail = [](int error) {
      errno = error;
      return ssize_t{-1};
    };
    if (header.cmd != RDMA_USER_CM_CMD_GET_EVENT) written++;
    else reader = writer, asked++;
    if (writer == stranger) return fail(EACCES);
    if (static_cast<int>(header.cmd) == refuse) return fail(EINVAL);
    const auto known = [&](std::uint32_t id, const char* what) {
      if (!ids.contains(id)) return fail(ENOENT);
      ids[id].done += what;
      return static_cast<ssize_t>(bytes);
    };
#define BODY(type) type c; memcpy(&c, body, sizeof(c))
    switch (header.cmd) {
      case RDMA_USER_CM_CMD_CREATE_ID: {
        BODY(rdma_ucm_create_id);
        ids[next] = {c.uid, node_guid};
        reinterpret_cast<rdma_ucm_create_id_resp*>(c.response)->id = next++;
        return static_cast<ssize_t>(bytes);
      }
      case RDMA_USER_CM_CMD_DESTROY_ID: {
        BODY(rdma_ucm_destroy_id);
        if (!ids.contains(c.id)) return fail(ENOENT);
        std::erase_if(events, [&](const auto& e) { return e.uid && e.uid == ids[c.id].uid; });
        ids.erase(c.id);
        return static_cast<ssize_t>(bytes);
      }
      case RDMA_USER_CM_CMD_GET_EVENT: {
        BODY(rdma_ucm_get_event);
        std::uint64_t seen;
        if (events.empty()) {
          (void)!::read(fd, &seen, sizeof(seen));
          return fail(EAGAIN);
        }
        memcpy(reinterpret_cast<void*>(c.response), &events.front(), sizeof(events.front()));
        events.pop_front();
        return static_cast<ssize_t>(bytes);
      }
      case RDMA_USER_CM_CMD_QUERY: {
        BODY(rdma_ucm_query);
        auto* to_addr = reinterpret_cast<rdma_ucm_query_addr_resp*>(c.response);
        memset(to_addr, 0, sizeof(*to_addr));
        if (!ids.contains(c.id)) return fail(ENOENT);
        to_addr->node_guid = ids[c.id].node_guid;
        if (address == std::array<std::uint8_t, 16>{}) {
          sockaddr_in any{};
          any.sin_family = AF_INET;
          any.sin_port = htons(port);
          to_addr->src_size = sizeof(any);
          memcpy(&to_addr->src_addr, &any, sizeof(any));
        } else {
          sockaddr_in6 at{};
          at.sin6_family = AF_INET6;
          at.sin6_port = htons(port);
          memcpy(&at.sin6_addr, address.data(), address.size());
          to_addr->src_size = sizeof(at);
          memcpy(&to_addr->src_addr, &at, sizeof(at));
        }
        return known(c.id, "query ");
      }
      case RDMA_USER_CM_CMD_BIND: {
        BODY(rdma_ucm_bind);
        if (only_v4 && c.addr.ss_family == AF_INET6) return fail(EAFNOSUPPORT);
        memcpy(&bound, &c.addr, std::min<std::size_t>(c.addr_size, sizeof(c.addr)));
        return known(c.id, "bind ");
      }
      case RDMA_USER_CM_CMD_SET_OPTION: { BODY(rdma_ucm_set_option); return known(c.id, "option "); }
      case RDMA_USER_CM_CMD_LISTEN: { BODY(rdma_ucm_listen); return known(c.id, "listen "); }
      case RDMA_USER_CM_CMD_RESOLVE_ADDR: { BODY(rdma_ucm_resolve_addr); memcpy(&resolved, &c.dst_addr, std::min<std::size_t>(c.dst_size, sizeof(c.dst_addr))); return known(c.id, "addr "); }
      case RDMA_USER_CM_CMD_RESOLVE_ROUTE: { BODY(rdma_ucm_resolve_route); return known(c.id, "route "); }
      case RDMA_USER_CM_CMD_DISCONNECT: { BODY(rdma_ucm_disconnect); return known(c.id, "disconnect "); }
      case RDMA_USER_CM_CMD_REJECT: { BODY(rdma_ucm_reject); memcpy(refused_by.data(), c.private_data + 8, refused_by.size()); return known(c.id, "reject "); }
      case RDMA_USER_CM_CMD_INIT_QP_ATTR: { BODY(rdma_ucm_init_qp_attr); return known(c.id, "attr "); }
      case RDMA_USER_CM_CMD_CONNECT: {
        BODY(rdma_ucm_connect);
        const ssize_t n = known(c.id, "connect ");
        if (n > 0) ids[c.id].param = c.conn_param;
        return n;
      }
      case RDMA_USER_CM_CMD_ACCEPT: {
        BODY(rdma_ucm_accept);
        const ssize_t n = known(c.id, "accept ");
        if (n > 0 && c.conn_param.valid) ids[c.id].uid = c.uid, ids[c.id].param = c.conn_param;
        return n;
      }
      default:
        return fail(EINVAL);
    }
  }
};

/// The numbers of the devices' GUIDs stand for the contexts.
QpName qp_on(std::uint64_t node_guid, std::uint32_t vqpn) { return {reinterpret_cast<const void*>(node_guid), vqpn}; }

class Cm : public testing::Test {
 protected:
  FakeKernel kernel;
  Engine engine{kernel.calls()};
  Instance self{1}, peer{2};
  int fd = -1;

  void SetUp() override {
    engine.name(self);
    engine.physical_qpn = [](QpName& qp, std::uint64_t node_guid) {
      qp = qp_on(node_guid, qp.vqpn);
      return qp.vqpn + 0x1000;
    };
    fd = engine.open_channel(O_CLOEXEC | O_NONBLOCK);
    ASSERT_GE(fd, 0);
  }
  void TearDown() override {
    if (fd >= 0) engine.close_channel(fd), close(fd);
  }
  template <class C>
  int send(std::uint32_t command, C c, std::size_t out = 0, int on = -1) {
    struct { rdma_ucm_cmd_hdr h; C c; } packet{{command, sizeof(C), static_cast<std::uint16_t>(out)}, c};
    const ssize_t n = engine.command(on < 0 ? fd : on, &packet, sizeof(packet));
    return n < 0 ? errno : n == sizeof(packet) ? 0 : -1;
  }
  std::uint32_t create(std::uint64_t uid, std::uint16_t ps = RDMA_PS_TCP) {
    rdma_ucm_create_id_resp r{};
    rdma_ucm_create_id c{uid, reinterpret_cast<std::uintptr_t>(&r), ps, 2, {}};
    EXPECT_EQ(send(RDMA_USER_CM_CMD_CREATE_ID, c, sizeof(r)), 0);
    return r.id;
  }
  int destroy(std::uint32_t id, std::uint32_t* reported = nullptr) {
    rdma_ucm_destroy_id_resp r{};
    const int error = send(RDMA_USER_CM_CMD_DESTROY_ID, rdma_ucm_destroy_id{reinterpret_cast<std::uintptr_t>(&r), id, 0}, sizeof(r));
    if (reported) *reported = r.events_reported;
    return error;
  }
  bool readable(int on = -1, int ms = 2000) {
    pollfd p{on < 0 ? fd : on, POLLIN, 0};
    return poll(&p, 1, ms) == 1;
  }
  /// The next event; its number is -1 if there is none.
  rdma_ucm_event_resp event(int on = -1, int ms = 2000) {
    rdma_ucm_event_resp r{};
    r.event = UINT32_MAX;
    if (!readable(on, ms)) return r;
    EXPECT_EQ(send(RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{reinterpret_cast<std::uintptr_t>(&r)}, sizeof(r), on), 0);
    return r;
  }
  void expect(std::uint32_t what, std::uint64_t uid, std::uint32_t id) {
    const auto e = event();
    EXPECT_EQ(e.event, what);
    EXPECT_EQ(e.uid, uid);
    EXPECT_EQ(e.id, id);
  }
  void quiet() { EXPECT_FALSE(readable(-1, 50)); }
  template <class F>
  void eventually(F f) {
    for (int i = 0; i < 400 && !f(); i++) usleep(5000);
    EXPECT_TRUE(f());
  }

  /// Active side, connected. @return the application's number
  std::uint32_t connected(std::uint64_t uid, std::uint32_t qpn) {
    const std::uint32_t id = create(uid), k = kernel.newest();
    EXPECT_EQ(send(RDMA_USER_CM_CMD_RESOLVE_ADDR, [&] { rdma_ucm_resolve_addr c{}; c.id = id; return c; }()), 0);
    kernel.tell(k, RDMA_CM_EVENT_ADDR_RESOLVED);
    expect(RDMA_CM_EVENT_ADDR_RESOLVED, uid, id);
    rdma_ucm_query_addr_resp at{};
    EXPECT_EQ(send(RDMA_USER_CM_CMD_QUERY, rdma_ucm_query{reinterpret_cast<std::uintptr_t>(&at), id, RDMA_USER_CM_QUERY_ADDR}, sizeof(at)), 0);
    EXPECT_EQ(send(RDMA_USER_CM_CMD_RESOLVE_ROUTE, rdma_ucm_resolve_route{id, 1}), 0);
    kernel.tell(k, RDMA_CM_EVENT_ROUTE_RESOLVED);
    expect(RDMA_CM_EVENT_ROUTE_RESOLVED, uid, id);
    rdma_ucm_connect c{};
    c.id = id;
    c.conn_param.qp_num = qpn;
    c.conn_param.valid = 1;
    EXPECT_EQ(send(RDMA_USER_CM_CMD_CONNECT, c), 0);
    EXPECT_EQ(kernel.ids[k].param.qp_num, qpn + 0x1000);
    kernel.tell(k, RDMA_CM_EVENT_CONNECT_RESPONSE);
    expect(RDMA_CM_EVENT_CONNECT_RESPONSE, uid, id);
    rdma_ucm_accept a{};
    a.id = id;
    EXPECT_EQ(send(RDMA_USER_CM_CMD_ACCEPT, a), 0);
    return id;
  }
  std::uint32_t listening(std::uint64_t uid) {
    const std::uint32_t id = create(uid);
    rdma_ucm_bind b{};
    b.id = id;
    b.addr_size = sizeof(sockaddr_in);
    EXPECT_EQ(send(RDMA_USER_CM_CMD_BIND, b), 0);
    EXPECT_EQ(send(RDMA_USER_CM_CMD_LISTEN, rdma_ucm_listen{id, kBacklog}), 0);
    return id;
  }
  Path path(std::uint32_t vqpn, bool restored) {
    return {qp_on(kernel.node_guid, vqpn), vqpn + 0x2000, 0x99, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2}, peer, restored, false};
  }
  /// The process arrives on another host.
  void migrate(std::vector<Path> paths) {
    std::string why;
    ASSERT_EQ(engine.freeze(why), 0) << why;
    ASSERT_EQ(engine.restored(paths, why), 0) << why;
  }
  void switched(std::uint32_t vqpn) {
    const Path p[] = {path(vqpn, false)};
    engine.switched(p);
  }
  /// The partner of `id` moves: until the link to it has been asked for.
  void partner_moves(std::uint32_t vqpn) {
    switched(vqpn);
    engine.peer_port(peer, 999);
    engine.resumed({});
  }
  void disconnect(std::uint32_t id) { EXPECT_EQ(send(RDMA_USER_CM_CMD_DISCONNECT, rdma_ucm_disconnect{id}), 0); }
  /// The partner's library connects again. @return the kernel's number of the request
  std::uint32_t link_asked(std::uint32_t listener, std::uint32_t pqpn) {
    struct { char magic[8]; Instance to; std::uint32_t dest, from; } hello{{'m', 'i', 'g', 'r', '-', 'c', 'm', '1'}, self, pqpn, 0x99};
    return kernel.request(listener, &hello, sizeof(hello));
  }
  void link_up(std::uint32_t k) {
    eventually([&] { return kernel.done(k) == "addr "; });
    kernel.tell(k, RDMA_CM_EVENT_ADDR_RESOLVED);
    eventually([&] { return kernel.done(k) == "addr route "; });
    kernel.tell(k, RDMA_CM_EVENT_ROUTE_RESOLVED);
    eventually([&] { return kernel.done(k) == "addr route connect "; });
  }
};

/// Of a connection whose partner has moved.
class CmPartner : public Cm {
 protected:
  std::uint32_t id = 0, k = 0;  ///< the application's number; the kernel's, of the link that was asked for

  void SetUp() override {
    Cm::SetUp();
    id = connected(0x88, 18);
    const auto before = kernel.newest();
    partner_moves(18);
    EXPECT_EQ(kernel.done(before), "gone");
    eventually([&] { return kernel.newest() > before; });
    k = kernel.newest();
    link_up(k);
  }
  /// That the connection has ended; then nothing of it is left.
  void expect_told_over_a_new_link() {
    eventually([&] { return kernel.newest() > k; });
    k = kernel.newest();
    link_up(k);
    kernel.tell(k, RDMA_CM_EVENT_CONNECT_RESPONSE);
    eventually([&] { return kernel.done(k) == "gone"; });
    EXPECT_FALSE(engine.uses({nullptr, 18}));
  }
  void expect_its_own_end() {
    expect(RDMA_CM_EVENT_DISCONNECTED, 0x88, id);
    expect(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0x88, id);
  }
};

TEST_F(Cm, CommandsAndEventsPassThrough) {
  const auto id = connected(0x1111, 17);
  quiet();
  const auto k = kernel.newest();
  disconnect(id);
  EXPECT_TRUE(kernel.done(k).ends_with("disconnect "));
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x1111, id);
  std::uint32_t reported = 0;
  EXPECT_EQ(destroy(id, &reported), 0);
  EXPECT_EQ(reported, 4u);
  EXPECT_EQ(kernel.count(), 0u);
  EXPECT_EQ(destroy(id), ENOENT);
}

// On another link, as the default one does not work: the kernel would ask the other end for a minute.
TEST_F(Cm, WhoseEndWasToldOtherwiseEndsAtOnce) {
  std::uint32_t asked = 0;
  engine.tell_end = [&](QpName qp) { return asked = qp.vqpn, qp.vqpn == 17; };
  const auto first = connected(0x1111, 17), k = kernel.newest(), second = connected(0x2222, 18);
  disconnect(first);
  EXPECT_TRUE(kernel.done(k).ends_with("disconnect "));
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x1111, first);
  expect(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0x1111, first);
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  quiet();
  disconnect(second);
  EXPECT_EQ(asked, 18u);
  quiet();
}

TEST_F(Cm, TheOtherEndTellsWhatItsKernelCannot) {
  const auto id = connected(0x1111, 17), k = kernel.newest();
  EXPECT_TRUE(engine.stands({nullptr, 17}));
  engine.ended({nullptr, 18});
  quiet();
  engine.ended({nullptr, 17});
  EXPECT_FALSE(engine.stands({nullptr, 17}));
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x1111, id);
  expect(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0x1111, id);
  engine.ended({nullptr, 17});
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);  // the cable was mended
  quiet();
  disconnect(id);
  EXPECT_TRUE(kernel.done(k).ends_with("disconnect "));
  quiet();
  EXPECT_EQ(destroy(id), 0);
}

TEST_F(Cm, ErrorsAreTheKernels) {
  EXPECT_EQ(send(RDMA_USER_CM_CMD_DISCONNECT, rdma_ucm_disconnect{42}), ENOENT);
  rdma_ucm_event_resp r;
  EXPECT_EQ(send(RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{reinterpret_cast<std::uintptr_t>(&r)}, sizeof(r)), EAGAIN);
  EXPECT_EQ(send(RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{reinterpret_cast<std::uintptr_t>(&r)}, 8), ENOSPC);
  kernel.refuse = RDMA_USER_CM_CMD_LISTEN;
  const auto id = create(1);
  EXPECT_EQ(send(RDMA_USER_CM_CMD_LISTEN, rdma_ucm_listen{id, 3}), EINVAL);
  EXPECT_EQ(engine.command(fd, "x", 1), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(Cm, DestroyDropsWhatWasNotRead) {
  const auto id = connected(1, 17);
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_DISCONNECTED);
  ASSERT_TRUE(readable());
  EXPECT_EQ(destroy(id), 0);
  EXPECT_FALSE(readable(-1, 0));
}

TEST_F(Cm, AReaderThatBlocksIsWoken) {
  const int blocking = engine.open_channel(O_CLOEXEC);
  const auto id = create(5);
  const auto k = kernel.newest();
  rdma_ucm_migrate_resp m{};
  EXPECT_EQ(send(RDMA_USER_CM_CMD_MIGRATE_ID, rdma_ucm_migrate_id{reinterpret_cast<std::uintptr_t>(&m), id, static_cast<std::uint32_t>(fd)}, sizeof(m), blocking), 0);
  rdma_ucm_event_resp r{};
  std::thread reader([&] { EXPECT_EQ(send(RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{reinterpret_cast<std::uintptr_t>(&r)}, sizeof(r), blocking), 0); });
  usleep(20000);
  kernel.tell(k, RDMA_CM_EVENT_ADDR_ERROR);
  reader.join();
  EXPECT_EQ(r.event, RDMA_CM_EVENT_ADDR_ERROR);
  EXPECT_EQ(r.uid, 5u);
  quiet();
  engine.close_channel(blocking);
  close(blocking);
  EXPECT_EQ(kernel.count(), 0u);
}

TEST_F(Cm, AReaderThatBlocksCanBeCancelled) {
  const int blocking = engine.open_channel(O_CLOEXEC);
  std::pair<Engine*, int> what{&engine, blocking};
  pthread_t t;
  pthread_create(&t, nullptr, [](void* p) -> void* {
    auto& [e, on] = *static_cast<std::pair<Engine*, int>*>(p);
    rdma_ucm_event_resp r;
    struct { rdma_ucm_cmd_hdr h; rdma_ucm_get_event c; } g{{RDMA_USER_CM_CMD_GET_EVENT, 8, sizeof(r)}, {reinterpret_cast<std::uintptr_t>(&r)}};
    e->command(on, &g, sizeof(g));
    return nullptr;
  }, &what);
  usleep(20000);
  pthread_cancel(t);
  void* result = nullptr;
  pthread_join(t, &result);
  EXPECT_EQ(result, PTHREAD_CANCELED);
  EXPECT_EQ(create(1) != 0, true);  // nothing is locked
  engine.close_channel(blocking);
  close(blocking);
}

TEST_F(Cm, AcceptedIdsAreNamedByTheApplication) {
  const auto listener = listening(0xaa);
  const auto k = kernel.request(kernel.newest());
  const auto e = event();
  EXPECT_EQ(e.event, RDMA_CM_EVENT_CONNECT_REQUEST);
  EXPECT_EQ(e.uid, 0xaau);
  EXPECT_NE(e.id, listener);
  rdma_ucm_accept a{};
  a.id = e.id;
  a.uid = 0xbb;
  a.conn_param.valid = 1;
  a.conn_param.qp_num = 20;
  EXPECT_EQ(send(RDMA_USER_CM_CMD_ACCEPT, a), 0);
  EXPECT_FALSE(engine.settle(0).empty());
  kernel.tell(k, RDMA_CM_EVENT_ESTABLISHED);
  expect(RDMA_CM_EVENT_ESTABLISHED, 0xbb, e.id);
  EXPECT_EQ(engine.settle(0), "");
}

TEST_F(Cm, PortsThatAreBoundAreDescribed) {
  listening(0xaa);
  const auto id = create(0xbb);
  int on = 1, off = 0;
  for (const int* value : {&on, &off, &on})
    EXPECT_EQ(send(RDMA_USER_CM_CMD_SET_OPTION,
                   rdma_ucm_set_option{reinterpret_cast<std::uintptr_t>(value), id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, sizeof(int)}), 0);
  EXPECT_EQ(send(RDMA_USER_CM_CMD_SET_OPTION, rdma_ucm_set_option{reinterpret_cast<std::uintptr_t>(&on), id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, 1}), 0);
  kernel.port = 4712;
  kernel.address = {0xfd, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  rdma_ucm_bind b{};
  b.id = id;
  EXPECT_EQ(send(RDMA_USER_CM_CMD_BIND, b), 0);
  connected(0xcc, 17);
  std::vector<migr_fd_desc> all;
  engine.describe(all);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].kind, std::uint32_t{MIGR_FD_CM});
  EXPECT_EQ(all[0].fd, engine.real_fd());
  for (const auto& d : {all[1], all[2]}) {
    EXPECT_EQ(d.kind, std::uint32_t{MIGR_FD_CM_PORT});
    EXPECT_EQ(d.fd, -1);
    EXPECT_EQ(d.obj_type, std::uint32_t{RDMA_PS_TCP});
  }
  EXPECT_EQ(all[1].obj_handle, 4711u);
  EXPECT_EQ(all[1].ring, std::uint32_t{AF_INET});
  EXPECT_EQ(all[1].addr | all[1].bytes | all[1].pgoff, 0u);
  EXPECT_EQ(all[2].obj_handle, 4712u);
  EXPECT_EQ(all[2].ring, std::uint32_t{AF_INET6});
  EXPECT_EQ(memcmp(&all[2].addr, kernel.address.data(), 16), 0);
  EXPECT_EQ(all[2].pgoff, 1ull << RDMA_OPTION_ID_REUSEADDR);
}

TEST_F(Cm, APortStaysBoundIfTheAddressIsNotResolved) {
  const auto id = create(0xaa), k = kernel.newest();
  rdma_ucm_bind b{};
  b.id = id;
  EXPECT_EQ(send(RDMA_USER_CM_CMD_BIND, b), 0);
  EXPECT_EQ(send(RDMA_USER_CM_CMD_RESOLVE_ADDR, [&] { rdma_ucm_resolve_addr c{}; c.id = id; return c; }()), 0);
  kernel.tell(k, RDMA_CM_EVENT_ADDR_ERROR, static_cast<std::uint32_t>(-ETIMEDOUT));
  expect(RDMA_CM_EVENT_ADDR_ERROR, 0xaa, id);
  std::vector<migr_fd_desc> all;
  engine.describe(all);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[1].kind, std::uint32_t{MIGR_FD_CM_PORT});
  migrate({});
  EXPECT_EQ(kernel.done(kernel.newest()), "bind ");
}

TEST_F(Cm, RequestsAboveTheBacklogAreRefused) {
  listening(0xaa);
  const auto listener = kernel.newest();
  for (int i = 0; i < 20; i++) kernel.request(listener);
  eventually([&] { return kernel.waiting() == 0 && kernel.count() == 1 + kBacklog; });
  EXPECT_EQ(event().event, RDMA_CM_EVENT_CONNECT_REQUEST);
  kernel.request(listener);  // there is room again, for one
  kernel.request(listener);
  eventually([&] { return kernel.waiting() == 0 && kernel.count() == 2 + kBacklog; });
  for (int i = 0; i < kBacklog; i++) EXPECT_EQ(event().event, RDMA_CM_EVENT_CONNECT_REQUEST);
  quiet();
}

TEST_F(Cm, UnreadRequestsGoWithAListenerToItsNewChannel) {
  const auto listener = listening(0xaa);
  kernel.request(kernel.newest());
  EXPECT_TRUE(readable());
  const int other = engine.open_channel(O_CLOEXEC | O_NONBLOCK);
  rdma_ucm_migrate_resp m{};
  EXPECT_EQ(send(RDMA_USER_CM_CMD_MIGRATE_ID, rdma_ucm_migrate_id{reinterpret_cast<std::uintptr_t>(&m), listener, static_cast<std::uint32_t>(fd)}, sizeof(m), other), 0);
  engine.close_channel(fd);
  close(fd);
  fd = other;
  EXPECT_EQ(kernel.count(), 2u);
  const auto e = event();
  EXPECT_EQ(e.event, RDMA_CM_EVENT_CONNECT_REQUEST);
  EXPECT_EQ(destroy(e.id), 0);
}

TEST_F(Cm, RequestThatIsDestroyedUnreadIsNotRead) {
  const auto listener = listening(0xaa);
  kernel.request(kernel.newest());
  EXPECT_TRUE(readable());
  EXPECT_EQ(destroy(listener + 1), 0);  // as it will be called
  EXPECT_EQ(kernel.count(), 1u);
  quiet();
  EXPECT_EQ(destroy(listener), 0);
}

TEST_F(Cm, CommandsThatNobodyKnowsStayHere) {
  const auto before = kernel.commands();
  EXPECT_EQ(send(99, rdma_ucm_disconnect{create(1)}), ENOSYS);
  EXPECT_EQ(kernel.commands(), before + 1) << "create() alone";
}

TEST_F(Cm, HalfMadeConnectionsAreNotMoved) {
  std::string why;
  listening(1);
  kernel.request(kernel.newest());
  eventually([&] { return !engine.settle(0).empty(); });
  EXPECT_EQ(engine.freeze(why), EAGAIN);
  EXPECT_NE(why.find("librdmacm"), std::string::npos);
  EXPECT_TRUE(readable());
}

// Of a server that somebody connects to all the time: DESCRIBE with MIGR_DESCRIBE_HOLD.
TEST_F(Cm, HeldRequestsAreToldLater) {
  listening(0xaa);
  const auto listener = kernel.newest();
  kernel.request(listener);
  EXPECT_TRUE(readable());
  engine.hold();
  for (int i = 0; i < kBacklog; i++) kernel.request(listener);
  eventually([&] { return kernel.waiting() == 0 && kernel.count() == 1 + kBacklog; });  // the backlog counts
  EXPECT_FALSE(readable(-1, 0));
  EXPECT_EQ(engine.settle(0), "");
  std::string why;
  EXPECT_EQ(engine.freeze(why), 0) << why;
  engine.rollback();
  quiet();
  engine.let_go();
  for (int i = 0; i < kBacklog; i++) EXPECT_EQ(event().event, RDMA_CM_EVENT_CONNECT_REQUEST);
  quiet();
}

// It may be to itself that a process is connecting: then its request is what ends that.
TEST_F(Cm, WhoIsConnectingIsToldOfRequestsThoughHeld) {
  listening(0xaa);
  const auto listener = kernel.newest();
  const auto id = create(1), k = kernel.newest();
  EXPECT_EQ(send(RDMA_USER_CM_CMD_CONNECT, [&] { rdma_ucm_connect c{}; c.id = id; return c; }()), 0);
  kernel.request(listener);
  EXPECT_TRUE(readable());
  engine.hold();
  EXPECT_EQ(event().event, RDMA_CM_EVENT_CONNECT_REQUEST);
  EXPECT_NE(engine.settle(0), "");
  kernel.tell(k, RDMA_CM_EVENT_REJECTED);
  expect(RDMA_CM_EVENT_REJECTED, 1, id);
  kernel.request(listener);
  eventually([&] { return kernel.waiting() == 0; });
  quiet();
  engine.let_go();
  EXPECT_EQ(event().event, RDMA_CM_EVENT_CONNECT_REQUEST);
}

TEST_F(Cm, HeldRequestsDoNotMove) {
  const auto id = listening(0xaa);
  const auto listener = kernel.newest();
  engine.hold();
  kernel.request(listener);
  migrate({});
  engine.let_go();
  quiet();
  EXPECT_EQ(engine.settle(0), "");
  kernel.request(kernel.newest());
  EXPECT_EQ(event().uid, 0xaau);
  EXPECT_EQ(destroy(id), 0);
}

TEST_F(Cm, WhileHeldOnlyWhatHasBegunGoesOn) {
  const auto first = create(1), k = kernel.newest(), stands = connected(3, 18);
  EXPECT_EQ(send(RDMA_USER_CM_CMD_RESOLVE_ADDR, [&] { rdma_ucm_resolve_addr c{}; c.id = first; return c; }()), 0);
  engine.hold();
  kernel.tell(k, RDMA_CM_EVENT_ADDR_RESOLVED);
  expect(RDMA_CM_EVENT_ADDR_RESOLVED, 1, first);
  EXPECT_EQ(send(RDMA_USER_CM_CMD_RESOLVE_ROUTE, rdma_ucm_resolve_route{first, 1}), 0);
  std::atomic<int> done = 0;
  const auto second = create(2), k2 = kernel.newest();
  std::thread begins([&] {
    EXPECT_EQ(send(RDMA_USER_CM_CMD_RESOLVE_ADDR, [&] { rdma_ucm_resolve_addr c{}; c.id = second; return c; }()), 0);
    ++done;
  });
  std::thread ends([&] {
    disconnect(stands);
    ++done;
  });
  kernel.tell(k, RDMA_CM_EVENT_ROUTE_ERROR);
  expect(RDMA_CM_EVENT_ROUTE_ERROR, 1, first);
  EXPECT_EQ(destroy(first), 0);
  EXPECT_EQ(engine.settle(2000), "");
  usleep(30'000);
  EXPECT_EQ(done, 0);
  EXPECT_EQ(kernel.done(k2), "");
  engine.let_go();
  begins.join();
  ends.join();
  EXPECT_EQ(kernel.done(k2), "addr ");
}

TEST_F(Cm, WhatCannotMoveHasAName) {
  EXPECT_EQ(engine.immovable(), "");
  const auto id = create(1, RDMA_PS_UDP);
  EXPECT_EQ(engine.immovable(), "");  // nothing of it is known to anybody yet
  rdma_ucm_resolve_addr c{};
  c.id = id;
  EXPECT_EQ(send(RDMA_USER_CM_CMD_RESOLVE_ADDR, c), 0);
  EXPECT_NE(engine.immovable().find("RDMA_PS_UDP"), std::string::npos);
}

// What DESCRIBE has judged may be another when the process is frozen.
TEST_F(Cm, WhatCannotMoveIsNotFrozen) {
  kernel.address = {0xfd, 1};
  const auto id = create(1);
  rdma_ucm_bind b{};
  b.id = id;
  b.addr_size = sizeof(sockaddr_in6);
  EXPECT_EQ(send(RDMA_USER_CM_CMD_BIND, b), 0);
  std::string why;
  const auto freeze = [&] {
    const int error = engine.freeze(why, [](QpName) { return false; });
    if (!error) engine.rollback();
    return error;
  };
  EXPECT_EQ(freeze(), EAGAIN);
  EXPECT_NE(why.find("bound to an address"), std::string::npos) << why;
  EXPECT_EQ(destroy(id), 0);  // commands do not wait
  const auto stands = connected(3, 18);
  EXPECT_EQ(freeze(), EAGAIN);
  EXPECT_NE(why.find("queue pair"), std::string::npos) << why;
  EXPECT_EQ(destroy(stands), 0);
  EXPECT_EQ(freeze(), 0) << why;
}

TEST_F(Cm, WhatARecordSaysIsCounted) {
  auto last = engine.changes();
  const auto counts = [&] { return engine.changes() > std::exchange(last, engine.changes()); };
  const auto id = create(1);
  EXPECT_FALSE(counts());
  rdma_ucm_bind b{};
  b.id = id;
  b.addr_size = sizeof(sockaddr_in);
  EXPECT_EQ(send(RDMA_USER_CM_CMD_BIND, b), 0);
  EXPECT_TRUE(counts());
  EXPECT_EQ(send(RDMA_USER_CM_CMD_LISTEN, rdma_ucm_listen{id, kBacklog}), 0);
  EXPECT_TRUE(counts());
  connected(3, 18);
  EXPECT_FALSE(counts());
  engine.close_channel(fd);
  close(fd);
  EXPECT_TRUE(counts());
  fd = engine.open_channel(O_CLOEXEC | O_NONBLOCK);
  EXPECT_TRUE(counts());
}

TEST_F(Cm, NothingIsBoundWhileHeld) {
  const auto id = create(1), k = kernel.newest();
  engine.hold();
  std::atomic<bool> done = false;
  std::thread binds([&] {
    rdma_ucm_bind b{};
    b.id = id;
    b.addr_size = sizeof(sockaddr_in);
    EXPECT_EQ(send(RDMA_USER_CM_CMD_BIND, b), 0);
    done = true;
  });
  usleep(30'000);
  EXPECT_FALSE(done);
  EXPECT_EQ(kernel.done(k), "");
  engine.let_go();
  binds.join();
}

// A client that has a channel for each of its connections.
TEST_F(Cm, NoFileIsOpenedOrClosedWhileHeld) {
  engine.hold();
  const auto before = engine.changes();
  engine.close_channel(fd);
  close(std::exchange(fd, -1));
  EXPECT_GE(engine.real_fd(), 0);
  std::atomic<bool> opened = false;
  std::thread opener([&] {
    fd = engine.open_channel(O_CLOEXEC | O_NONBLOCK);
    opened = true;
  });
  usleep(30'000);
  EXPECT_FALSE(opened);
  EXPECT_EQ(engine.settle(0), "");
  EXPECT_EQ(engine.changes(), before);
  EXPECT_EQ(kernel.opened, 1);
  engine.let_go();
  opener.join();
  ASSERT_GE(fd, 0);
  EXPECT_EQ(kernel.opened, 2) << "who opens it may have other credentials than the thread of before";
  EXPECT_EQ(engine.changes(), before + 2);
}

TEST_F(Cm, ListenersAreMadeAgain) {
  const auto listener = listening(0xaa);
  migrate({});
  EXPECT_EQ(kernel.opened, 2);
  EXPECT_EQ(kernel.done(kernel.newest()), "bind listen ");
  EXPECT_EQ(engine.port(), 0);  // no connection to take up
  kernel.request(kernel.newest());
  const auto e = event();
  EXPECT_EQ(e.uid, 0xaau);
  EXPECT_EQ(destroy(listener), 0);
}

// Its port is another process's there.
TEST_F(Cm, ListenerThatCannotBeMadeAgainIsTold) {
  const auto listener = listening(0xaa);
  kernel.refuse = RDMA_USER_CM_CMD_BIND;
  migrate({});
  kernel.refuse = -1;
  expect(RDMA_CM_EVENT_DEVICE_REMOVAL, 0xaa, listener);
  quiet();
  EXPECT_EQ(kernel.count(), 0u);
  EXPECT_EQ(destroy(listener), 0);
}

TEST_F(Cm, WithoutTheDeviceListenersAreToldAndConnectionsGoOn) {
  const auto listener = listening(0xaa), stands = connected(1, 17);
  std::string why;
  ASSERT_EQ(engine.freeze(why), 0) << why;
  kernel.gone = true;
  EXPECT_EQ(engine.restored({}, why), ENOENT);
  EXPECT_NE(why.find("rdma_cm"), std::string::npos);
  expect(RDMA_CM_EVENT_DEVICE_REMOVAL, 0xaa, listener);
  quiet();
  EXPECT_TRUE(engine.stands({nullptr, 17}));
  EXPECT_EQ(destroy(listener), 0);
  EXPECT_EQ(destroy(stands), 0);
}

/// The kernel's file is opened and written by the same thread, whoever asks.
TEST_F(Cm, AChannelOpenedAfterARestoreIsWrittenByItsOpener) {
  engine.close_channel(fd);
  close(fd);
  std::string why;
  ASSERT_EQ(engine.freeze(why), 0);
  ASSERT_EQ(engine.restored({}, why), 0);
  fd = engine.open_channel(O_CLOEXEC | O_NONBLOCK);
  ASSERT_GE(fd, 0);
  create(1);
  EXPECT_EQ(kernel.opener, kernel.writer);
  EXPECT_NE(kernel.writer, gettid());
}

// setuid() gives each thread credentials of its own, and the kernel compares them by pointer.
TEST_F(Cm, EventsComeAfterAChangeOfCredentialsWithNothingOpen) {
  create(1);
  eventually([&] { return kernel.last_reader() != 0; });
  engine.close_channel(fd);
  close(fd);
  kernel.stranger = kernel.last_reader();
  fd = engine.open_channel(O_CLOEXEC | O_NONBLOCK);
  ASSERT_GE(fd, 0);
  const auto id = create(2);
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_ADDR_ERROR);
  expect(RDMA_CM_EVENT_ADDR_ERROR, 2, id);
}

TEST_F(Cm, WhatTheKernelDoesNotTellIsAskedForSeldom) {
  const auto id = create(1);
  eventually([&] { return kernel.last_reader() != 0; });
  {
    std::lock_guard guard(kernel.lock);
    kernel.refuse = RDMA_USER_CM_CMD_GET_EVENT;
    kernel.asked = 0;
  }
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_ADDR_ERROR);
  usleep(250'000);
  {
    std::lock_guard guard(kernel.lock);
    EXPECT_GT(kernel.asked, 0);
    EXPECT_LT(kernel.asked, 10);
    kernel.refuse = -1;
  }
  expect(RDMA_CM_EVENT_ADDR_ERROR, 1, id);
}

TEST_F(Cm, UnreadEventsMove) {
  const auto id = connected(1, 17);
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_DISCONNECTED);
  migrate({});
  expect(RDMA_CM_EVENT_DISCONNECTED, 1, id);
  std::uint32_t reported;
  EXPECT_EQ(destroy(id, &reported), 0);
  EXPECT_EQ(reported, 4u);
}

TEST_F(Cm, CommandsWaitWhileFrozen) {
  std::string why;
  ASSERT_EQ(engine.freeze(why), 0);
  std::atomic<bool> done = false;
  std::thread other([&] {
    create(9);
    done = true;
  });
  usleep(30000);
  EXPECT_FALSE(done);
  engine.rollback();
  other.join();
  EXPECT_EQ(kernel.opened, 1);
}

// Who opens the first channel meanwhile has its thread started, which then finds nothing that it may do.
TEST_F(Cm, OpensThatMeetAFreezeComeThrough) {
  engine.close_channel(fd);
  close(std::exchange(fd, -1));
  engine.by_own_thread();
  for (int i = 0; i < 3000; i++) {
    std::thread opener([&] { fd = engine.open_channel(O_CLOEXEC | O_NONBLOCK); });
    usleep(static_cast<useconds_t>(i % 50 * 4));
    std::string why;
    EXPECT_EQ(engine.freeze(why), 0) << why;
    usleep(200);
    engine.rollback();
    opener.join();
    ASSERT_GE(fd, 0);
    engine.close_channel(fd);
    close(std::exchange(fd, -1));
  }
}

// After a restore that goes to our thread, which ends with the last channel.
TEST_F(Cm, ACommandThatWaitsWhileItsChannelIsClosedFails) {
  migrate({});
  const auto id = create(1);
  engine.hold();
  std::thread begins([&] {
    rdma_ucm_resolve_addr c{};
    c.id = id;
    EXPECT_EQ(send(RDMA_USER_CM_CMD_RESOLVE_ADDR, c), EACCES);
  });
  usleep(30'000);
  engine.close_channel(fd);
  engine.let_go();
  begins.join();
  close(std::exchange(fd, -1));
}

TEST_F(Cm, RestoredSideTakesTheConnectionUp) {
  const auto id = connected(0x77, 17);
  migrate({path(17, true)});
  EXPECT_EQ(engine.port(), 4711);
  quiet();
  const auto k = link_asked(kernel.newest(), 17 + 0x2000);
  eventually([&] { return kernel.done(k) == "accept "; });
  EXPECT_EQ(kernel.ids[k].param.qp_num, 17u + 0x2000);
  kernel.tell(k, RDMA_CM_EVENT_ESTABLISHED);
  quiet();  // the application has had that
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x77, id);
  quiet();
}

TEST_F(Cm, RestoredSideListensAtAddressesOfBothVersions) {
  connected(0x77, 17);
  kernel.address = {0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  migrate({path(17, true)});
  EXPECT_EQ(kernel.bound.ss_family, AF_INET6);
  EXPECT_EQ(kernel.done(kernel.newest()), "option bind listen query ");
  EXPECT_EQ(engine.port(), 4711);
}

TEST_F(Cm, RestoredSideListensAtThoseOfVersion4WhereThereIsNoOther) {
  connected(0x77, 17);
  kernel.only_v4 = true;
  migrate({path(17, true)});
  EXPECT_EQ(kernel.bound.ss_family, AF_INET);
  EXPECT_EQ(engine.port(), 4711);
}

// The last message of the new relation's making was lost, or its sender.
TEST_F(Cm, RestoredSideWaitsForAnotherLink) {
  const auto id = connected(0x77, 17);
  migrate({path(17, true)});
  const auto listener = kernel.newest();
  for (const std::uint32_t what : {RDMA_CM_EVENT_UNREACHABLE, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_CONNECT_ERROR}) {
    const auto k = link_asked(listener, 17 + 0x2000);
    eventually([&] { return kernel.done(k) == "accept "; });
    kernel.tell(k, what);
    eventually([&] { return kernel.done(k) == "gone"; });
  }
  quiet();
  const auto k = link_asked(listener, 17 + 0x2000);
  eventually([&] { return kernel.done(k) == "accept "; });
  disconnect(id);
  kernel.tell(k, RDMA_CM_EVENT_UNREACHABLE);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x77, id);
}

TEST_F(Cm, RestoredSideRefusesWhatHasEnded) {
  const auto id = connected(0x77, 17);
  migrate({path(17, true)});
  const auto listener = kernel.newest();
  disconnect(id);  // with no kernel's id to ask
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x77, id);
  expect(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0x77, id);
  disconnect(id);
  quiet();
  const auto k = link_asked(listener, 17 + 0x2000);
  eventually([&] { return kernel.done(k) == "gone"; });
  EXPECT_EQ(kernel.refused_by, self);
}

TEST_F(Cm, WhatDidNotSurviveTheRestoreHasEnded) {
  const auto id = connected(0x77, 17);
  Path gone = path(17, true);
  gone.gone = true;
  migrate({gone});
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x77, id);
  EXPECT_EQ(engine.port(), 0);
}

TEST_F(Cm, WhatHadEndedBeforeLeavesTimewait) {
  const auto id = connected(0x55, 17), other = connected(0x66, 18), k = kernel.newest();
  kernel.tell(k - 1, RDMA_CM_EVENT_DISCONNECTED);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x55, id);
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x66, other);
  kernel.tell(k, RDMA_CM_EVENT_TIMEWAIT_EXIT);
  expect(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0x66, other);
  migrate({});
  expect(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0x55, id);  // rdma_disconnect() of an id without a channel of its own waits for it
  quiet();
  disconnect(id);
  migrate({});
  quiet();
}

TEST_F(Cm, PartnerConnectsAgainToAGidOfVersion6) {
  connected(0x88, 18);
  const auto before = kernel.newest();
  Path to[] = {path(18, false)};
  to[0].dgid = {0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  engine.switched(to);
  engine.peer_port(peer, 999);
  engine.resumed({});
  eventually([&] { return kernel.newest() > before && kernel.done(kernel.newest()) == "addr "; });
  std::lock_guard guard(kernel.lock);
  sockaddr_in6 at{};
  memcpy(&at, &kernel.resolved, sizeof(at));
  EXPECT_EQ(at.sin6_family, AF_INET6);
  EXPECT_EQ(ntohs(at.sin6_port), 999);
  EXPECT_EQ(memcmp(&at.sin6_addr, to[0].dgid.data(), sizeof(at.sin6_addr)), 0);
}

TEST_F(CmPartner, ConnectsAgain) {
  sockaddr_in at{};
  memcpy(&at, &kernel.resolved, sizeof(at));
  EXPECT_EQ(at.sin_family, AF_INET);
  EXPECT_EQ(ntohl(at.sin_addr.s_addr), 0x0a000002u);
  EXPECT_EQ(kernel.ids[k].param.qp_num, 18u + 0x2000);
  kernel.tell(k, RDMA_CM_EVENT_CONNECT_RESPONSE);
  eventually([&] { return kernel.done(k) == "addr route connect accept "; });
  quiet();
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x88, id);
  quiet();
}

TEST_F(CmPartner, ThatMovesOnIsConnectedToWhereItIsNow) {
  switched(18);
  EXPECT_EQ(kernel.done(k), "gone");  // nobody will listen there any more
  usleep(50000);
  EXPECT_EQ(kernel.newest(), 0u);
  engine.peer_port(peer, 1000);
  engine.resumed({});
  eventually([&] { return kernel.newest() > k; });
  k = kernel.newest();
  link_up(k);
  EXPECT_EQ(kernel.count(), 1u);
  kernel.tell(k, RDMA_CM_EVENT_CONNECT_RESPONSE);
  eventually([&] { return kernel.done(k) == "addr route connect accept "; });
  quiet();
}

TEST_F(CmPartner, ThatMovesOnToWhereItCannotListenIsNotAskedForAtTheOldPort) {
  switched(18);
  engine.resumed({});
  usleep(50000);
  EXPECT_EQ(kernel.newest(), 0u);
  quiet();
}

TEST_F(CmPartner, ThatGoesBackIsConnectedToAfterAll) {
  switched(18);
  engine.rollback();
  eventually([&] { return kernel.newest() > k; });
  quiet();
}

TEST_F(CmPartner, ThatMovesOnHearsThatTheConnectionHasEnded) {
  EXPECT_EQ(destroy(id), 0);
  EXPECT_TRUE(engine.uses({nullptr, 18}));
  partner_moves(18);
  EXPECT_EQ(kernel.done(k), "gone");
  expect_told_over_a_new_link();
}

TEST_F(CmPartner, HearsOfAnEndFromWhereThatProcessHasMoved) {
  EXPECT_EQ(destroy(id), 0);
  migrate({});
  expect_told_over_a_new_link();
}

TEST_F(CmPartner, IsRefusedByItsPartnerOnly) {
  const auto refuse = [&](Instance by) {
    struct { char magic[8]; Instance by; std::uint32_t zero[2]; } no{{'m', 'i', 'g', 'r', '-', 'c', 'm', '1'}, by, {}};
    kernel.tell(k, RDMA_CM_EVENT_REJECTED, 28, &no, sizeof(no));
  };
  refuse({3});  // has that port now
  eventually([&] { return kernel.newest() > k; });
  quiet();
  k = kernel.newest();
  link_up(k);
  refuse(peer);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x88, id);
}

TEST_F(CmPartner, ConnectsOnceMoreIfTheOtherEndHasLetGo) {
  kernel.tell(k, RDMA_CM_EVENT_CONNECT_RESPONSE);
  eventually([&] { return kernel.done(k) == "addr route connect accept "; });
  kernel.tell(k, RDMA_CM_EVENT_REJECTED, 28);
  eventually([&] { return kernel.newest() > k; });
  quiet();
  k = kernel.newest();
  link_up(k);
  kernel.tell(k, RDMA_CM_EVENT_CONNECT_RESPONSE);
  eventually([&] { return kernel.done(k) == "addr route connect accept "; });
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x88, id);
}

// With its own event it may exit, and the link would go with it.
TEST_F(CmPartner, ThatDisconnectsMeanwhileHearsOfItWhenTheOtherEndDoes) {
  disconnect(id);
  disconnect(id);
  quiet();
  kernel.tell(k, RDMA_CM_EVENT_CONNECT_RESPONSE);
  expect_its_own_end();
  EXPECT_EQ(kernel.done(k), "gone");
  EXPECT_EQ(destroy(id), 0);
}

TEST_F(CmPartner, ThatDisconnectsAndDestroysMeanwhileTellsTheOtherEnd) {
  disconnect(id);
  EXPECT_EQ(destroy(id), 0);
  kernel.tell(k, RDMA_CM_EVENT_CONNECT_RESPONSE);
  eventually([&] { return kernel.done(k) == "gone"; });
}

TEST_F(CmPartner, ThatDisconnectsMeanwhileHearsOfItThoughTheOtherEndIsGone) {
  disconnect(id);
  kernel.tell(k, RDMA_CM_EVENT_REJECTED, 8);
  expect_its_own_end();
}

// Or it would wait for ten tries, and not be movable.
TEST_F(CmPartner, ThatDisconnectsMeanwhileHearsOfItAfterATryThatFails) {
  kernel.tell(k, RDMA_CM_EVENT_UNREACHABLE);
  eventually([&] { return kernel.newest() > k; });
  disconnect(id);
  quiet();
  k = kernel.newest();
  kernel.tell(k, RDMA_CM_EVENT_ADDR_ERROR);
  expect_its_own_end();
  EXPECT_EQ(engine.settle(0), "");
  expect_told_over_a_new_link();
  quiet();
}

TEST_F(CmPartner, ThatDisconnectsOnceTheOtherEndMovesOnHearsOfItThen) {
  switched(18);
  disconnect(id);
  engine.peer_port(peer, 999);
  engine.resumed({});
  quiet();
  expect_told_over_a_new_link();
  expect_its_own_end();
}

TEST_F(CmPartner, ThatDisconnectsOnceTheOtherEndMovesOnHearsOfItIfThatGoesBack) {
  switched(18);
  disconnect(id);
  engine.rollback();
  quiet();
  expect_told_over_a_new_link();
  expect_its_own_end();
}

TEST_F(CmPartner, ThatDisconnectsWhileTheOtherEndMovesOnHearsOfItThen) {
  disconnect(id);
  partner_moves(18);
  quiet();
  expect_told_over_a_new_link();
  expect_its_own_end();
}

TEST_F(CmPartner, ThatDisconnectsWhileTheOtherEndMovesToWhereItCannotListenHearsOfItAtOnce) {
  disconnect(id);
  switched(18);
  engine.resumed({});
  expect_its_own_end();
}

TEST_F(CmPartner, LearnsThatTheOtherEndIsGone) {
  kernel.tell(k, RDMA_CM_EVENT_REJECTED, 8);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x88, id);
}

TEST_F(Cm, SourcesEndIsNoEndUnlessItGoesBack) {
  const auto id = connected(0x88, 18);
  const auto k = kernel.newest();
  switched(18);
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  quiet();
  engine.rollback();
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x88, id);
}

// The application has connected it again, and not destroyed the id of before.
// The other end is connected as soon as it has sent its last message, which the source may send again and then is gone.
TEST_F(Cm, WhoLacksTheLastMessageWhenThePartnerMovesIsConnected) {
  listening(0xaa);
  kernel.request(kernel.newest());
  const auto id = event().id, k = kernel.newest();
  rdma_ucm_accept a{};
  a.id = id;
  a.uid = 0xbb;
  a.conn_param.valid = 1;
  a.conn_param.qp_num = 18;
  EXPECT_EQ(send(RDMA_USER_CM_CMD_ACCEPT, a), 0);
  switched(18);
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  quiet();
  engine.peer_port(peer, 999);
  engine.resumed({});
  expect(RDMA_CM_EVENT_ESTABLISHED, 0xbb, id);
  quiet();
  EXPECT_EQ(kernel.done(k), "gone");
  eventually([&] { return kernel.newest() > k; });
  link_up(kernel.newest());
  EXPECT_EQ(engine.settle(0), "");
}

TEST_F(Cm, AQpIsOfTheIdThatStands) {
  const auto ended = connected(0x11, 18);
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_DISCONNECTED);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x11, ended);
  const auto ending = connected(0x22, 18), k = kernel.newest();
  disconnect(ending);
  const auto id = connected(0x33, 18), k2 = kernel.newest();
  EXPECT_TRUE(engine.stands({nullptr, 18}));
  switched(18);
  kernel.tell(k2, RDMA_CM_EVENT_DISCONNECTED);  // the source's copy
  quiet();
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x22, ending);
  engine.rollback();
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x33, id);
  EXPECT_FALSE(engine.uses({nullptr, 18}));
}

TEST_F(Cm, WhoDisconnectsWhileThePartnerMovesHearsThatItHasEnded) {
  const auto id = connected(0x88, 18), k = kernel.newest();
  disconnect(id);
  switched(18);
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  kernel.tell(k, RDMA_CM_EVENT_TIMEWAIT_EXIT);
  quiet();
  engine.peer_port(peer, 999);
  engine.resumed({});
  EXPECT_EQ(kernel.done(k), "gone");
  eventually([&] { return kernel.newest() > k; });
  link_up(kernel.newest());
  quiet();  // with its event it may exit, and the link would go with it
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_CONNECT_RESPONSE);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x88, id);
  expect(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0x88, id);
  EXPECT_EQ(engine.settle(0), "");
}

TEST_F(Cm, WhoDisconnectsWhileThePartnerMovesToWhereItCannotListenHearsOfItAtOnce) {
  const auto id = connected(0x88, 18), k = kernel.newest();
  switched(18);
  disconnect(id);
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  quiet();
  engine.resumed({});
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x88, id);
}

/// An end that goes between SWITCH and RESUME: the kernel would tell the source's copy only.
class CmGoneWhileThePartnerMoves : public Cm {
 protected:
  void expect_the_other_end_is_told(std::uint32_t before) {
    EXPECT_TRUE(engine.uses({nullptr, 18}));
    usleep(50000);
    EXPECT_LE(kernel.newest(), before);  // not before RESUME: it is not known where to
    engine.peer_port(peer, 999);
    engine.resumed({});
    eventually([&] { return kernel.newest() > before; });
    const auto k = kernel.newest();
    link_up(k);
    kernel.tell(k, RDMA_CM_EVENT_CONNECT_RESPONSE);
    eventually([&] { return kernel.done(k) == "gone"; });
    EXPECT_FALSE(engine.uses({nullptr, 18}));
    quiet();
  }
};

TEST_F(CmGoneWhileThePartnerMoves, WithoutAWord) {
  const auto id = connected(0x88, 18), k = kernel.newest();
  switched(18);
  EXPECT_EQ(destroy(id), 0);
  expect_the_other_end_is_told(k);
}

TEST_F(CmGoneWhileThePartnerMoves, WithoutAWordWhenThatWasFrozenAlready) {
  const auto id = connected(0x88, 18), k = kernel.newest();
  EXPECT_FALSE(engine.uses({nullptr, 19}));
  EXPECT_EQ(destroy(id), 0);
  EXPECT_TRUE(engine.uses({nullptr, 18}));  // its QP is there, else nobody would ask
  switched(18);
  engine.peer_port(peer, 999);
  engine.resumed({});
  eventually([&] { return kernel.newest() > 0; });
  link_up(kernel.newest());
  EXPECT_NE(kernel.newest(), k);
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_CONNECT_RESPONSE);
  eventually([&] { return kernel.count() == 0; });
  const auto again = connected(0x99, 18);  // a new connection of that QP is another one
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_DISCONNECTED);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x99, again);
  EXPECT_EQ(destroy(again), 0);
  EXPECT_FALSE(engine.uses({nullptr, 18}));
}

TEST_F(CmGoneWhileThePartnerMoves, WithoutAWordAndThenMovesToo) {
  engine.name({3});  // the greater one: but nobody connects to who has no connection
  const auto id = connected(0x88, 18), k = kernel.newest();
  EXPECT_EQ(destroy(id), 0);
  const Path p[] = {path(18, true)};
  migrate({p[0]});
  EXPECT_TRUE(engine.uses({nullptr, 18}));
  engine.peer_port(peer, 999);
  engine.resumed(p);
  eventually([&] { return kernel.newest() > k; });
  link_up(kernel.newest());
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_CONNECT_RESPONSE);
  eventually([&] { return kernel.count() == 0; });
}

TEST_F(CmGoneWhileThePartnerMoves, WithItsChannelAndThenNothingIsOpen) {
  const auto id = connected(0x88, 18), k = kernel.newest();
  switched(18);
  EXPECT_EQ(destroy(id), 0);
  engine.close_channel(fd);
  close(std::exchange(fd, -1));
  EXPECT_GE(engine.real_fd(), 0);
  engine.peer_port(peer, 999);
  engine.resumed({});
  eventually([&] { return kernel.newest() > k; });
  link_up(kernel.newest());
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_CONNECT_RESPONSE);
  eventually([&] { return engine.real_fd() < 0; });
}

TEST_F(CmGoneWhileThePartnerMoves, ANewQpOfItsNumberStays) {
  const auto id = connected(0x88, 18);
  switched(18);
  EXPECT_EQ(destroy(id), 0);
  connected(0x99, 18);
  const auto fresh = kernel.newest();
  engine.peer_port(peer, 999);
  engine.resumed({});
  eventually([&] { return kernel.newest() > fresh; });  // which tells the other end of the old one
  link_up(kernel.newest());
  kernel.tell(kernel.newest(), RDMA_CM_EVENT_CONNECT_RESPONSE);
  quiet();
  EXPECT_NE(kernel.done(fresh), "gone");
}

TEST_F(CmGoneWhileThePartnerMoves, AfterADisconnect) {
  const auto id = connected(0x88, 18), k = kernel.newest();
  switched(18);
  disconnect(id);
  EXPECT_EQ(destroy(id), 0);
  expect_the_other_end_is_told(k);
}

TEST_F(CmGoneWhileThePartnerMoves, BeforeThatHasConnectedAgain) {
  const auto id = connected(0x88, 18);
  migrate({path(18, true)});
  const auto k = kernel.newest();
  switched(18);
  disconnect(id);
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x88, id);
  expect(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0x88, id);
  EXPECT_EQ(destroy(id), 0);
  expect_the_other_end_is_told(k);
}

TEST_F(CmGoneWhileThePartnerMoves, WhoGoesBack) {
  const auto id = connected(0x88, 18);
  connected(0x99, 19);
  const auto k = kernel.newest();
  const Path both[] = {path(18, false), path(19, false)};
  engine.switched(both);
  EXPECT_EQ(destroy(id), 0);
  engine.rollback();
  EXPECT_FALSE(engine.uses({nullptr, 18}));
  engine.peer_port(peer, 999);
  engine.resumed({});
  usleep(50000);
  EXPECT_EQ(kernel.newest(), k);
}

TEST_F(Cm, RollbackLeavesEverything) {
  const auto id = connected(0x88, 18);
  const auto k = kernel.newest();
  std::string why;
  ASSERT_EQ(engine.freeze(why), 0);
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);
  quiet();
  engine.rollback();
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x88, id);
  EXPECT_EQ(kernel.opened, 1);
}

// QPs of two devices may have one number.
TEST_F(Cm, AnotherDevicesQpOfThatNumberStays) {
  kernel.node_guid = 2;
  connected(0x11, 18);
  const auto stays = kernel.newest();
  kernel.node_guid = 1;
  const auto id = connected(0x22, 18), k = kernel.newest();
  switched(18);
  kernel.tell(k, RDMA_CM_EVENT_DISCONNECTED);  // the source's copy
  quiet();
  engine.ended(qp_on(3, 18));
  engine.peer_port(peer, 999);
  engine.resumed({});
  EXPECT_EQ(kernel.done(k), "gone");
  EXPECT_NE(kernel.done(stays), "gone");
  engine.ended(qp_on(1, 18));
  expect(RDMA_CM_EVENT_DISCONNECTED, 0x22, id);
  EXPECT_TRUE(engine.stands(qp_on(2, 18)));
  EXPECT_FALSE(engine.stands(qp_on(1, 18)));
}

TEST_F(Cm, GidsAreNamedAsOfTheIdsDevice) {
  engine.known_gid = [](std::uint64_t node_guid, std::uint8_t, std::uint8_t index) { return static_cast<std::uint8_t>(index + node_guid); };
  for (const std::uint64_t device : {2, 1}) {
    kernel.node_guid = device;
    const auto id = connected(device, 18);
    ib_uverbs_qp_attr attr{};
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.sgid_index = 3;
    EXPECT_EQ(send(RDMA_USER_CM_CMD_INIT_QP_ATTR, rdma_ucm_init_qp_attr{reinterpret_cast<std::uintptr_t>(&attr), id, 2 /* RTR */}, sizeof attr), 0);
    EXPECT_EQ(attr.ah_attr.grh.sgid_index, 3 + device);
  }
}

TEST_F(Cm, RestoredSideKnowsTheDeviceByTheRequest) {
  std::vector<Path> paths;
  for (const std::uint64_t device : {2, 1}) {
    kernel.node_guid = device;
    connected(device * 0x11, 18);
    paths.push_back(path(18, true));
  }
  migrate(paths);
  const auto listener = kernel.newest();
  const auto first = link_asked(listener, 18 + 0x2000);
  kernel.node_guid = 2;
  const auto second = link_asked(listener, 18 + 0x2000);
  for (const auto k : {first, second}) eventually([&] { return kernel.done(k) == "query accept "; });
  kernel.tell(second, RDMA_CM_EVENT_DISCONNECTED);
  EXPECT_EQ(event().uid, 0x22u);
  kernel.tell(first, RDMA_CM_EVENT_DISCONNECTED);
  EXPECT_EQ(event().uid, 0x11u);
}

TEST_F(Cm, RestoredSideTellsTwoQpsOfOneNumberApart) {
  std::vector<Path> paths;
  for (const std::uint64_t device : {2, 1}) {
    kernel.node_guid = device;
    connected(device, 18);
    paths.push_back(path(18, true));
    paths.back().pqpn = 100 + static_cast<std::uint32_t>(device);
  }
  migrate(paths);
  const auto listener = kernel.newest();
  for (const std::uint32_t pqpn : {102, 101}) {
    const auto k = link_asked(listener, pqpn);
    eventually([&] { return kernel.done(k) == "accept "; });
    EXPECT_EQ(kernel.ids[k].param.qp_num, pqpn);
  }
}

TEST_F(Cm, OneOfTwoThatMovedTogetherBegins) {
  connected(0x77, 17);
  migrate({path(17, true)});
  const auto listener = kernel.newest();
  engine.peer_port(peer, 999);
  const Path p[] = {path(17, true)};
  engine.resumed(p);  // self < peer
  eventually([&] { return kernel.newest() > listener; });
  engine.name({3});
  migrate({path(17, true)});
  engine.peer_port(peer, 999);
  const auto again = kernel.newest();
  engine.resumed(p);
  usleep(50000);
  EXPECT_EQ(kernel.newest(), again);
}

// Who closes the last one waits for the thread's end: but the thread stays for the next one.
TEST_F(Cm, TheLastCloseReturnsThoughAnotherOpensMeanwhile) {
  for (int i = 0; i < 300 && !HasFailure(); i++) {
    std::atomic<bool> closed = false;
    std::thread closer([&] {
      engine.close_channel(fd);
      closed = true;
    });
    usleep(static_cast<useconds_t>(i % 50 * 4));
    const int next = engine.open_channel(O_CLOEXEC | O_NONBLOCK);
    EXPECT_GE(next, 0);
    eventually([&] { return closed.load(); });
    if (!closed) engine.close_channel(next);
    closer.join();
    close(std::exchange(fd, next));
  }
}

}  // namespace
}  // namespace migr::cm
