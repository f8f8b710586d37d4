// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * Connections by librdmacm that check themselves across a switchover.
 *
 *   migr_cm [--port N] [--status FILE] [--stop-file FILE] [--clients N]           the server: waits for N clients
 *   migr_cm --connect HOST [--port N] [--status FILE] [--stop-file FILE]          a client: asks, and checks the answers
 *
 * A client sends numbered messages, one at a time; the server answers each with what it got, turned round bit by bit. A
 * thread of its own waits for events of librdmacm: each kind is counted. An end disconnects when its stop file exists, and
 * ends when it has seen the DISCONNECTED of every connection; it waits a moment longer, so that one event too many is seen.
 * The status is the target of a symbolic link: {"messages":…,"errors":…,"first_error":…,"established":…,"disconnected":…,"timewait":…,"other":…}
 * Exit status 0: no error, and exactly one DISCONNECTED for each connection.
 */
#include <netdb.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kDepth = 8;
constexpr int kConnectMs = 3000, kStallMs = 120'000;
constexpr unsigned kWords = 64;

struct Options {
  std::string host, port = "18600", status, stop;
  unsigned clients = 1;
};

struct Message {
  std::uint64_t number;
  std::uint64_t word[kWords];
};

std::uint64_t word_of(std::uint64_t number, unsigned i) { return (number * 0x9e3779b97f4a7c15u) ^ (i * 0xbf58476d1ce4e5b9u); }

std::atomic<std::uint64_t> messages, errors, established, disconnected, timewait, other;
std::mutex first_lock;
std::string first_error;

void complain(const std::string& what) {
  std::lock_guard guard(first_lock);
  if (first_error.empty()) first_error = what;
  errors++;
  std::fprintf(stderr, "migr_cm: %s\n", what.c_str());
}

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "migr_cm: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(2);
}

/// A symbolic link whose target is the text: no file is ever open. CRIU opens what was open by its name again, and this
/// one's lasts a moment and is on one host.
void write_status(const Options& o) {
  if (o.status.empty()) return;
  const std::string part = o.status + ".part";
  char text[1024];
  {
    std::lock_guard guard(first_lock);
    std::snprintf(text, sizeof text,
                  "{\"messages\":%llu,\"errors\":%llu,\"first_error\":\"%.256s\",\"established\":%llu,\"disconnected\":%llu,"
                  "\"timewait\":%llu,\"other\":%llu}",
                  static_cast<unsigned long long>(messages), static_cast<unsigned long long>(errors), first_error.c_str(),
                  static_cast<unsigned long long>(established), static_cast<unsigned long long>(disconnected),
                  static_cast<unsigned long long>(timewait), static_cast<unsigned long long>(other));
  }
  unlink(part.c_str());
  if (symlink(text, part.c_str()) || std::rename(part.c_str(), o.status.c_str())) std::fprintf(stderr, "migr_cm: %s: %s\n", part.c_str(), std::strerror(errno));
}

/// One connection, with buffers for kDepth receives and one send.
struct Connection {
  rdma_cm_id* id;
  ibv_pd* pd;
  ibv_cq* cq;
  std::vector<Message> room{kDepth + 1};
  ibv_mr* mr;
  std::atomic<bool> up = false, down = false;
  bool asked = false;
  std::uint64_t next = 1;

  explicit Connection(rdma_cm_id* with) : id(with) {
    pd = ibv_alloc_pd(id->verbs);
    cq = pd ? ibv_create_cq(id->verbs, 2 * kDepth + 2, nullptr, nullptr, 0) : nullptr;
    mr = cq ? ibv_reg_mr(pd, room.data(), room.size() * sizeof(Message), IBV_ACCESS_LOCAL_WRITE) : nullptr;
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.qp_type = IBV_QPT_RC;
    init.cap = {2, kDepth, 1, 1, 0};
    if (!mr || rdma_create_qp(id, pd, &init)) give_up("a QP");
    for (int i = 0; i < kDepth; i++) receive(i);
  }
  void receive(int slot) {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(&room[slot]), sizeof(Message), mr->lkey};
    ibv_recv_wr wr{}, *bad;
    wr.wr_id = static_cast<std::uint64_t>(slot);
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (ibv_post_recv(id->qp, &wr, &bad)) complain("a receive was not posted");
  }
  void send() {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(&room[kDepth]), sizeof(Message), mr->lkey};
    ibv_send_wr wr{}, *bad;
    wr.wr_id = kDepth;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (ibv_post_send(id->qp, &wr, &bad)) complain("a send was not posted");
  }
  void ask() {
    Message& m = room[kDepth];
    m.number = next;
    for (unsigned i = 0; i < kWords; i++) m.word[i] = word_of(next, i);
    send();
    asked = true;
  }
  /// One completion. @param serve the server's end: answers
  bool step(bool serve) {
    ibv_wc wc;
    const int n = ibv_poll_cq(cq, 1, &wc);
    if (n < 0) complain("poll_cq failed");
    if (n <= 0) return false;
    if (wc.status != IBV_WC_SUCCESS) {
      if (wc.status != IBV_WC_WR_FLUSH_ERR && !down) complain(std::string("completion: ") + ibv_wc_status_str(wc.status));
      return true;
    }
    if (wc.opcode != IBV_WC_RECV) return true;
    const Message& m = room[wc.wr_id];
    bool fine = m.number == next;
    for (unsigned i = 0; fine && i < kWords; i++) fine = m.word[i] == (serve ? word_of(next, i) : ~word_of(next, i));
    if (!fine) complain("message " + std::to_string(m.number) + " where " + std::to_string(next) + " was due, or its content");
    if (serve) {
      room[kDepth] = m;
      for (std::uint64_t& w : room[kDepth].word) w = ~w;
    }
    receive(static_cast<int>(wc.wr_id));
    next++;
    messages++;
    if (serve) send();
    asked = false;
    return true;
  }
};

rdma_conn_param param() {
  rdma_conn_param p{};
  p.responder_resources = p.initiator_depth = 1;
  p.retry_count = 7;
  p.rnr_retry_count = 7;
  return p;
}

std::mutex all_lock;
std::vector<Connection*> all;

/// The thread that waits for events, with poll() as well as in the call itself.
void watch(rdma_event_channel* channel, bool poll_first) {
  for (;;) {
    pollfd p{channel->fd, POLLIN, 0};
    if (poll_first && poll(&p, 1, -1) < 0) continue;
    rdma_cm_event* event;
    if (rdma_get_cm_event(channel, &event)) {
      if (errno == EAGAIN || errno == EINTR) continue;
      give_up("rdma_get_cm_event");
    }
    rdma_cm_id* id = event->id;
    const rdma_cm_event_type what = event->event;
    if (what == RDMA_CM_EVENT_CONNECT_REQUEST) {
      auto* c = new Connection(id);
      id->context = c;
      rdma_conn_param p = param();
      if (rdma_accept(id, &p)) give_up("rdma_accept");
      std::lock_guard guard(all_lock);
      all.push_back(c);
    }
    auto* c = static_cast<Connection*>(id->context);
    rdma_ack_cm_event(event);
    switch (what) {
      case RDMA_CM_EVENT_CONNECT_REQUEST: break;
      case RDMA_CM_EVENT_ESTABLISHED:
        established++;
        c->up = true;
        break;
      case RDMA_CM_EVENT_DISCONNECTED:
        c->down = true;
        disconnected++;
        rdma_disconnect(id);
        break;
      case RDMA_CM_EVENT_TIMEWAIT_EXIT: timewait++; break;
      default:
        other++;
        complain(std::string("event ") + rdma_event_str(what));
    }
  }
}

void expect(rdma_event_channel* channel, rdma_cm_event_type what) {
  rdma_cm_event* event;
  if (rdma_get_cm_event(channel, &event)) give_up("rdma_get_cm_event");
  if (event->event != what) give_up(std::string(rdma_event_str(event->event)) + " instead of " + rdma_event_str(what));
  rdma_ack_cm_event(event);
}

bool exists(const std::string& path) {
  struct stat st;
  return !path.empty() && !stat(path.c_str(), &st);
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    if (i + 1 >= argc) give_up("an argument for " + name);
    const std::string value = argv[++i];
    if (name == "--connect") o.host = value;
    else if (name == "--port") o.port = value;
    else if (name == "--status") o.status = value;
    else if (name == "--stop-file") o.stop = value;
    else if (name == "--clients") o.clients = static_cast<unsigned>(std::stoul(value));
    else give_up("no option " + name);
  }
  const bool serve = o.host.empty();
  rdma_event_channel* channel = rdma_create_event_channel();
  rdma_cm_id* id;
  if (!channel || rdma_create_id(channel, &id, nullptr, RDMA_PS_TCP)) give_up("rdma_create_id");
  addrinfo hint{}, *to;
  hint.ai_family = AF_INET;
  hint.ai_flags = serve ? AI_PASSIVE : 0;
  if (getaddrinfo(serve ? nullptr : o.host.c_str(), o.port.c_str(), &hint, &to)) give_up("address " + o.host);
  if (serve) {
    if (rdma_bind_addr(id, to->ai_addr) || rdma_listen(id, 8)) give_up("rdma_listen");
    write_status(o);  // READY
  } else {
    if (rdma_resolve_addr(id, nullptr, to->ai_addr, kConnectMs)) give_up("rdma_resolve_addr");
    expect(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
    if (rdma_resolve_route(id, kConnectMs)) give_up("rdma_resolve_route");
    expect(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
    auto* c = new Connection(id);
    id->context = c;
    rdma_conn_param p = param();
    if (rdma_connect(id, &p)) give_up("rdma_connect");
    all.push_back(c);
    o.clients = 1;
  }
  std::thread(watch, channel, !serve).detach();
  bool told = false;
  unsigned ticks = 0, idle = 0;
  for (;;) {
    bool busy = false;
    unsigned up = 0, down = 0;
    {
      std::lock_guard guard(all_lock);
      for (Connection* c : all) {
        while (c->step(serve)) busy = true;
        if (c->up && !serve && !c->asked && !c->down && !told) c->ask();
        up += c->up;
        down += c->down;
      }
      if (!told && up == o.clients && exists(o.stop)) {
        told = true;
        for (Connection* c : all) {
          c->down = true;  // what is flushed from now on is no error
          if (rdma_disconnect(c->id)) complain("rdma_disconnect");
        }
      }
    }
    if (disconnected >= o.clients) break;
    (void)down;
    if (up && !busy && ++idle > kStallMs) {
      complain("stalled");
      break;
    }
    if (busy) idle = 0;
    if (++ticks % 100 == 0) write_status(o);
    usleep(1000);
  }
  sleep(2);
  write_status(o);
  return errors || disconnected != o.clients || established != o.clients;
}
