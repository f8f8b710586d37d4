/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * The exported ibv_* symbols and the slots of ibv_context / verbs_context: the
 * control path. Each takes the application's shadows, calls libibverbs with the
 * provider's objects, and remembers. docs/architecture.md tells the way in.
 */
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "control.h"
#include "datagrams.h"
#include "environment.h"
#include "events.h"
#include "gids.h"
#include "kernel_link.h"
#include "links/cq_room.h"
#include "links/links.h"
#include "objects.h"
#include "path.h"
#include "provider/provider.h"
#include "provider/uverbs_write.h"
#include "real.h"
#include "shadow.h"
#include "switchover/switchover.h"
#include "unread.h"
#include "whereabouts.h"
#include "windows.h"

namespace migr {

Registry& Registry::get() {
  static Registry* registry = new Registry;  // never destroyed: threads may outlive main()
  return *registry;
}

Context* Registry::context_of(const ibv_context* real) const {
  for (Context* c : contexts)
    if (c->real == real) return c;
  return nullptr;
}

std::uint32_t Context::ctx_id() const { return kernel->ctx_id(); }

void Registry::cannot_move(const char* what, int change) {
  const auto found = std::find_if(unsupported.begin(), unsupported.end(), [&](const auto& u) { return u.what == what; });
  if (found == unsupported.end())
    unsupported.push_back({what, change});
  else if ((found->count += change) == 0)
    unsupported.erase(found);
}

namespace {

/// MIGR_FORCE_SWITCHED=names: objects have another name than the device's, so that one that nobody translates is seen:
/// MRs their lkey, RC and UC QPs their number. Both ends of a connection need it; what names a remote key or a UD QP is as
/// it was. The bits are those of an index: devices count from low numbers.
constexpr std::uint32_t kForcedKeyBit = 1u << 30;
constexpr std::uint32_t kForcedQpnBit = 1u << 23;

bool renamed(const ibv_qp& qp) { return environment::force_names() && (qp.qp_type == IBV_QPT_RC || qp.qp_type == IBV_QPT_UC); }

void say_no_name(const char* of, std::uint32_t name, int err) {
  std::fprintf(stderr, "libmigr: MIGR_FORCE_SWITCHED: no name %#x for %s: %s\n", name, of, std::strerror(err));
}

}  // namespace

/// Of a maker that we do not stand in front of (mlx5dv_reg_dmabuf_mr() of a newer rdma-core) it is the provider's.
MrShadow* known(Registry& registry, ibv_mr* mr) {
  if (!registry.context_of(mr->context)) return nullptr;
  return registry.mrs.contains(&shadow_of(mr)) ? &shadow_of(mr) : nullptr;
}
QpShadow* known(Registry& registry, ibv_qp* qp) {
  return registry.is_shadow(qp) ? &shadow_of(qp) : nullptr;
}
CqShadow* known(Registry& registry, ibv_cq* cq) {
  return registry.is_shadow(cq) ? &shadow_of(cq) : nullptr;
}
SrqShadow* known(Registry& registry, ibv_srq* srq) {
  return registry.is_shadow(srq) ? &shadow_of(srq) : nullptr;
}

RemoteKeys::RemoteKeys(const std::vector<std::pair<std::uint32_t, std::uint32_t>>& virtual_to_physical, bool all) : all_(all) {
  std::size_t size = 2;
  while (size < 2 * (virtual_to_physical.size() + 1)) size *= 2;
  mask_ = static_cast<std::uint32_t>(size - 1);
  slots_.resize(size);
  for (const auto& [vrkey, prkey] : virtual_to_physical) {
    const std::uint32_t index = vrkey >> 8;
    if (!index) continue;
    std::uint32_t i = index & mask_;
    while (slots_[i].index && slots_[i].index != index) i = (i + 1) & mask_;
    slots_[i] = {index, prkey ^ (vrkey & 0xff)};
  }
}

bool is_name(const Registry& registry, const Context& context, std::uint32_t key) {
  const std::uint32_t index = key >> 8;
  if (!index) return false;
  const auto calls_so = [&](const Context* c) {
    if (c != &context && !(c->renamed && !std::strcmp(c->real->device->name, context.real->device->name))) return false;
    const migr_key_entry& entry = c->kernel->key_table()[index];
    return (entry.lkey && entry.lkey >> 8 != index) || (entry.rkey && entry.rkey >> 8 != index);
  };
  return std::any_of(registry.contexts.begin(), registry.contexts.end(), calls_so) || windows::is_name(context, key) || registry.is_retired(key);
}

namespace {

/// The names of an MR that the device has just given its keys.
void name_mr(MrShadow& shadow) {
  const ibv_mr& mr = *shadow.real;
  KernelLink& kernel = *shadow.context->kernel;
  shadow.app.lkey = mr.lkey;
  shadow.app.rkey = mr.rkey;
  const std::uint32_t vlkey = environment::force_names() ? mr.lkey ^ kForcedKeyBit : mr.lkey;
  migr_ioc_query_mr names{.handle = mr.handle, .vlkey = 0, .vrkey = 0, .plkey = 0, .prkey = 0, .reserved = 0};
  if (kernel.attached() && vlkey != mr.lkey) {
    names.vrkey = kernel.query_mr(mr.handle, names) ? 0 : names.vrkey;
    if (const int err = kernel.bind_mr(mr.handle, vlkey, names.vrkey, mr.lkey, mr.rkey)) say_no_name("an MR", vlkey, err);
  }
  if (!kernel.attached()) {
    kernel.bind_mr(mr.handle, vlkey, mr.rkey, mr.lkey, mr.rkey);
    shadow.app.lkey = vlkey;
  } else if (!kernel.query_mr(mr.handle, names)) {
    shadow.app.lkey = names.vlkey;
    if (names.vrkey) shadow.app.rkey = names.vrkey;
  }
}

/// Memory that is not registered any more, at a time when it may have been copied ahead of a stop: FREEZE, which sees to what a
/// NIC has written, will not know of it. The application may have unmapped parts of it, or made them read-only.
void note_written(Registry& registry, const MrShadow& shadow, const ibv_mr& was) {
  if (!registry.copied_ahead || !shadow.movable || !switchover::touch_pages(was.addr, was.length, shadow.access)) return;
  if (!switchover::touch_unmarked(was.addr, was.length)) registry.unmarked = true;
}

/// Memory that a device only reads, at such a time: kernels from 6.2 on give it pages of its own as they pin it, in place of that of zeros or those of a
/// file, and do not mark them as written.
void note_pinned(Registry& registry, const MrShadow& shadow) {
  if (!registry.copied_ahead || !shadow.movable || shadow.access & switchover::kWritable) return;
  if (!switchover::touch_unmarked(shadow.app.addr, shadow.app.length, true)) registry.unmarked = true;
}

/// Its keys are nobody's any more. Partners that were told what they stand for would still translate them.
/// @return false: they were never told
bool retire_keys(Registry& registry, const ibv_mr& name, const ibv_mr& real) {
  if (name.rkey == real.rkey || environment::force_names()) return false;
  registry.retired_keys.insert(name.rkey >> 8);
  return true;
}

/// Where the addresses that its lkey goes with lie.
void note_shift(const MrShadow& shadow) { datagrams::note_shift(*shadow.context, shadow.app.lkey, reinterpret_cast<std::uintptr_t>(shadow.app.addr) - shadow.iova); }

}  // namespace

ibv_mr* adopt_mr(Registry& registry, Context& context, ibv_mr* mr, int access, std::uint64_t iova, bool movable) {
  auto* shadow = new (std::nothrow) MrShadow{};
  if (!shadow) {
    real().dereg_mr(mr);
    errno = ENOMEM;
    return nullptr;
  }
  shadow->app = *mr;
  std::memcpy(shadow->behind, mr + 1, sizeof shadow->behind);
  shadow->real = mr;
  shadow->context = &context;
  shadow->access = access;
  shadow->iova = iova;
  shadow->movable = movable && !(access & IBV_ACCESS_ON_DEMAND);
  name_mr(*shadow);
  registry.mrs.add(shadow);
  note_pinned(registry, *shadow);
  if (const auto shift = reinterpret_cast<std::uintptr_t>(mr->addr) - iova) datagrams::note_shift(context, shadow->app.lkey, shift);
  const int err = links::made(*shadow);
  if (!err) return &shadow->app;
  links::gone(*shadow);
  datagrams::note_shift(context, shadow->app.lkey, 0);
  retire_keys(registry, shadow->app, *mr);
  registry.mrs.remove(shadow);
  delete shadow;
  real().dereg_mr(mr);
  errno = err;
  return nullptr;
}

/// Its device has kept it as it was. What is not on the links of its QPs again is said: the call has failed for another reason.
void made_again(MrShadow& mr) {
  const int saved = errno;
  if (const int err = links::made(mr))
    std::fprintf(stderr, "libmigr: memory at %p is still registered, and not any more on the link that a QP of its PD is on: %s\n", mr.app.addr, std::strerror(err));
  errno = saved;
}

ibv_qp* adopt_qp(Registry& registry, Context& context, QpShadow& shadow, ibv_qp* qp) {
  shadow.real = qp;
  shadow.context = &context;
  shadow.real_post_send = context.ops.post_send;
  shadow.real_post_recv = context.ops.post_recv;
  shadow.key_table = context.kernel->key_table();
  shadow.app = *qp;
  shadow.app.qp_context = shadow.init.qp_context;
  shadow.app.send_cq = shadow.init.send_cq;
  shadow.app.recv_cq = shadow.init.recv_cq;
  shadow.app.srq = shadow.init.srq;
  pthread_mutex_init(&shadow.app.mutex, nullptr);
  pthread_cond_init(&shadow.app.cond, nullptr);
  shadow.send_cq = shadow.init.send_cq ? &shadow_of(shadow.init.send_cq) : nullptr;
  shadow.recv_cq = shadow.init.recv_cq ? &shadow_of(shadow.init.recv_cq) : nullptr;
  if (environment::force_switched()) shadow.state.store(kForced, std::memory_order_relaxed);
  const std::uint32_t vqpn = renamed(*qp) ? qp->qp_num ^ kForcedQpnBit : qp->qp_num;
  if (!context.kernel->attached() || vqpn != qp->qp_num)
    if (const int err = context.kernel->bind_qp(vqpn, qp->qp_num)) say_no_name("a QP", vqpn, err);
  const std::uint32_t entry = context.kernel->qpn_table()[qp->qp_num & MIGR_QPN_MASK];
  if (entry & MIGR_QPN_VALID) shadow.app.qp_num = entry & MIGR_QPN_MASK;
  if (shadow.app.qp_num != qp->qp_num)
    for (CqShadow* cq : {shadow.send_cq, shadow.recv_cq})
      if (cq) {
        std::lock_guard guard(cq->lock);
        path::translate_qpns(*cq, kTranslateQpn);
      }
  if (ibv_qp_ex* ex = real().qp_to_qp_ex ? real().qp_to_qp_ex(qp) : nullptr) {
    shadow.real_ex = ex;
    path::install_wr_api(shadow);
  }
  if (context.renamed) path::translate_keys(shadow, kTranslateLocal);
  registry.qps.push_back(&shadow);
  registry.note_shadow(&shadow.app);
  datagrams::made(shadow);
  windows::made(shadow);
  links::attached(shadow);
  links::share_room(shadow);
  return &shadow.app;
}

namespace {

/// libibverbs' ibv_reg_mr calls the exported ibv_reg_mr_iova2: the inner call must not be wrapped again.
thread_local int inside_real = 0;
struct InsideReal {
  InsideReal() { ++inside_real; }
  ~InsideReal() { --inside_real; }
};

template <class T>
void forget(std::vector<T*>& all, T* one) {
  std::erase(all, one);
}

/* ---- MR ------------------------------------------------------------------- */

constexpr int kMaxKeyCollisions = 64;
constexpr int kRemoteAccess = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/// Partners or we would take it for something else.
bool is_mistaken(const Registry& registry, const Context& context, const ibv_mr& mr) {
  migr_ioc_query_mr names{.handle = mr.handle, .vlkey = 0, .vrkey = 0, .plkey = 0, .prkey = 0, .reserved = 0};
  const bool other = context.kernel->attached() && !context.kernel->query_mr(mr.handle, names) && names.vlkey != names.plkey;
  return other || is_name(registry, context, mr.rkey);
}

/// What brings a device past keys that are names: the smallest that can be registered, often.
class Fillers {
 public:
  explicit Fillers(ibv_pd* pd) : pd_(pd) {}
  Fillers(const Fillers&) = delete;
  ~Fillers() { give_back(); }
  /// Caller holds the lock.
  void pass_names(Registry& registry, const Context& context, std::unique_lock<std::mutex>& guard) {
    static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    static void* const page = private_memory(nullptr, bytes);  // of its own: ibv_fork_init() takes it from children
    if (!page) return;
    const std::size_t most = registry.mrs.size() + registry.retired_keys.size() + context.windows + 1;
    for (std::size_t i = 0; i < most; ++i) {
      ibv_mr* const mr = without_lock(guard, [&] { return real().reg_mr(pd_, page, bytes, 0); });
      if (!mr && all_.empty()) return;
      if (!mr) {  // there is no room for more; a device that counts goes on from there
        give_back();
        continue;
      }
      // Most count: the key after a good one is to be good, too.
      if (!is_name(registry, context, mr->lkey) && !is_name(registry, context, mr->lkey + 0x100)) {
        real().dereg_mr(mr);  // one that does not gives it again
        return;
      }
      all_.push_back(mr);
    }
  }

 private:
  void give_back() {
    const int saved = errno;
    for (ibv_mr* mr : all_) real().dereg_mr(mr);
    all_.clear();
    errno = saved;
  }
  ibv_pd* const pd_;
  std::vector<ibv_mr*> all_;
};

/// Registers until the device gives a key that nothing of this process is called: keys that peers use need no
/// translation then. The ones in between are given back, each before the next: it may be much memory.
template <class Register>
ibv_mr* register_mr(ibv_pd* pd, int access, std::uint64_t iova, bool movable, Register&& register_once) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  Context* context = registry.context_of(pd->context);
  InsideReal nested;
  if (!context) return without_lock(guard, register_once);
  const Registering registering(registry);
  Fillers fillers(pd);
  for (int collisions = 0;; ++collisions) {
    ibv_mr* const mr = without_lock(guard, register_once);
    if (!mr) return nullptr;
    const bool last = collisions == kMaxKeyCollisions;
    if (!is_mistaken(registry, *context, *mr) || (last && !(access & kRemoteAccess))) return adopt_mr(registry, *context, mr, access, iova, movable);
    without_lock(guard, [&] { return real().dereg_mr(mr); });
    if (last) return errno = ENOMEM, nullptr;
    fillers.pass_names(registry, *context, guard);
  }
}

/* ---- CQ ------------------------------------------------------------------- */

CqShadow* new_cq(Context& context) {
  auto* shadow = new (std::nothrow) CqShadow{};
  if (!shadow) return nullptr;
  shadow->context = &context;
  shadow->qpn_table = context.kernel->qpn_table();
  shadow->real_poll = context.ops.poll_cq;
  if (environment::force_switched()) shadow->state.store(kCqForced, std::memory_order_relaxed);
  // With backup links from the beginning: who polls has to be known when the first one counts.
  if (context.twin || (environment::force_protected() && path::watch_pollers())) shadow->state.fetch_or(kProtectedCq, std::memory_order_relaxed);
  return shadow;
}

/// A path that is cut completes work requests of ours, too, in a CQ that may have no more entries than the application needs.
/// @param make  with that many entries; false: the device has not so many, or something else is wrong
template <class Make>
void make_roomy(const Context& context, int cqe, Make&& make) {
  constexpr int kOurs = links::kOurEntries;
  if (!context.twin || cqe < 1 || cqe > INT_MAX - kOurs || !make(cqe + kOurs)) make(cqe);
}

/// Into a queue of no depth nothing can be posted, and what was cut could not be told. As verbs allows it the application is told of one more.
void make_roomy(const Context& context, ibv_qp_type type, const ibv_srq* srq, ibv_qp_cap& cap) {
  if (!context.twin || type != IBV_QPT_RC) return;
  cap.max_send_wr = std::max(cap.max_send_wr, 1u);
  if (!srq) cap.max_recv_wr = std::max(cap.max_recv_wr, 1u);
}

void adopt_cq(Registry& registry, CqShadow& shadow, ibv_cq* cq, void* cq_context) {
  shadow.real = cq;
  shadow.app = *cq;
  shadow.app.cq_context = cq_context;
  pthread_mutex_init(&shadow.app.mutex, nullptr);
  pthread_cond_init(&shadow.app.cond, nullptr);
  registry.cqs.push_back(&shadow);
  registry.note_shadow(&shadow.app);
  windows::made(shadow);
}

}  // namespace

ibv_cq_ex* create_cq_with(ibv_context* ctx, ibv_cq_init_attr_ex& attr,
                          const std::function<ibv_cq_ex*(ibv_cq_init_attr_ex*)>& create) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  Context* context = registry.context_of(ctx);
  if (!context) return create(&attr);
  CqShadow* shadow = new_cq(*context);
  if (!shadow) {
    errno = ENOMEM;
    return nullptr;
  }
  ibv_cq_init_attr_ex mine = attr;
  mine.cq_context = shadow;
  // The control thread polls as well while a QP is suspended, and that of the links where there are any. Not of another family that cannot be
  // migrated: there a session's own thread, which may destroy a QP with that flag, would wait for the lock that the provider has taken in start_poll.
  const bool others_poll = context->twin || provider::is_supported(*context->real, context->ops);
  if ((mine.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) && others_poll) mine.flags &= ~std::uint32_t{IBV_CREATE_CQ_ATTR_SINGLE_THREADED};
  ibv_cq_ex* cq = nullptr;
  make_roomy(*context, static_cast<int>(attr.cqe), [&](int entries) {
    mine.cqe = static_cast<std::uint32_t>(entries);
    return (cq = create(&mine)) != nullptr;
  });
  if (!cq) {
    delete shadow;
    return nullptr;
  }
  adopt_cq(registry, *shadow, ibv_cq_ex_to_cq(cq), attr.cq_context);
  shadow->real_ex = cq;
  path::install_pollers(*shadow);
  return &shadow->app_ex;
}

namespace {

constexpr std::size_t kReservedNumbers = 64;  // that may follow each other, beside those of the process

/// Creates until the device gives a number that is nobody's name: who sends datagrams to it, and a partner without libmigr, know no other. The
/// ones in between are given back. @param mine  what `create` is given; it puts into it what it got
template <class Attr, class Create>
ibv_qp* create_numbered(const Registry& registry, const Context& context, Attr& mine, Create&& create) {
  const Attr asked = mine;
  std::vector<ibv_qp*> others;
  ibv_qp* qp;
  while ((qp = create(mine)) && context.kernel->is_name_of_another(qp->qp_num) && others.size() < registry.qps.size() + kReservedNumbers) {
    others.push_back(qp);
    mine = asked;
  }
  const int saved = errno;
  if (!qp && !others.empty()) {  // there are no more: one that is called otherwise is better than none
    qp = others.back();
    others.pop_back();
  }
  for (ibv_qp* other : others) real().destroy_qp(other);
  errno = saved;
  return qp;
}

/// Those that path::install_wr_api() has a call for. One of a newer rdma-core (IBV_QP_EX_WITH_FLUSH) would be missing in our ibv_qp_ex.
constexpr std::uint64_t kKnownSendOps =
    IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
    IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW |
    IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_TSO | IBV_QP_EX_WITH_ATOMIC_WRITE;

}  // namespace

ibv_qp* create_qp_with(ibv_context* ctx, ibv_qp_init_attr_ex& attr,
                       const std::function<ibv_qp*(ibv_qp_init_attr_ex*)>& create) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  Context* context = registry.context_of(ctx);
  if (!context) return create(&attr);
  if ((attr.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) && (attr.send_ops_flags & ~kKnownSendOps)) return errno = EOPNOTSUPP, nullptr;
  auto* shadow = new (std::nothrow) QpShadow{};
  if (!shadow) {
    errno = ENOMEM;
    return nullptr;
  }
  shadow->init = attr;
  shadow->init_is_ex = true;
  ibv_qp_init_attr_ex mine = attr;
  mine.qp_context = shadow;
  mine.send_cq = real_cq(attr.send_cq);
  mine.recv_cq = real_cq(attr.recv_cq);
  mine.srq = real_srq(attr.srq);
  make_roomy(*context, mine.qp_type, mine.srq, mine.cap);
  ibv_qp* qp = create_numbered(registry, *context, mine, [&](ibv_qp_init_attr_ex& a) { return create(&a); });
  if (!qp) {
    delete shadow;
    return nullptr;
  }
  attr.cap = shadow->cap = mine.cap;
  return adopt_qp(registry, *context, *shadow, qp);
}

namespace {

ibv_cq_ex* create_cq_ex(ibv_context* ctx, ibv_cq_init_attr_ex* attr) {
  return create_cq_with(ctx, *attr, [&](ibv_cq_init_attr_ex* mine) {
    return events::with_kernel_fd(*ctx, [&] { return Registry::get().context_of(ctx)->slots.create_cq_ex(ctx, mine); });
  });
}

int req_notify_cq(ibv_cq* cq, int solicited_only) {
  CqShadow& shadow = shadow_of(cq);
  const NoCancel no_cancel;
  std::lock_guard guard(shadow.lock);
  // As long as an earlier arming may hold, the stronger of the two does.
  shadow.solicited_only = solicited_only && (!shadow.armed || shadow.solicited_only);
  shadow.last_solicited_only = solicited_only;
  ++shadow.armed;
  ++shadow.armings;
  shadow.arm_unsure = false;                                               // either it is armed now, or an event is on its way that will be seen
  if (shadow.state.load(std::memory_order_relaxed) & kFrozenCq) return 0;  // armed again when it is thawed
  if (const int err = links::arm(shadow, solicited_only)) return err;
  return shadow.context->ops.req_notify_cq(shadow.real, solicited_only);
}

/* ---- QP ------------------------------------------------------------------- */

ibv_qp_init_attr_ex widened(const ibv_qp_init_attr& attr, ibv_pd* pd) {
  ibv_qp_init_attr_ex ex{};
  std::memcpy(&ex, &attr, sizeof attr);  // the common first members, as verbs.h promises
  ex.comp_mask = IBV_QP_INIT_ATTR_PD;
  ex.pd = pd;
  return ex;
}

ibv_qp* create_qp_ex(ibv_context* ctx, ibv_qp_init_attr_ex* attr) {
  return create_qp_with(ctx, *attr, [&](ibv_qp_init_attr_ex* mine) {
    return events::with_kernel_fd(*ctx, [&] { return Registry::get().context_of(ctx)->slots.create_qp_ex(ctx, mine); });
  });
}

/// For a work request that ends the binding of a window: providers look for an lkey also where there is no MR (rdma-core 44).
ibv_mr* no_memory() {
  static MrShadow* const none = [] {
    auto* const mr = new MrShadow{};
    mr->real = &mr->app;
    return mr;
  }();
  return &none->app;
}

int bind_mw(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* bind) {
  QpShadow& shadow = shadow_of(qp);
  if (provider::binds_by_work_request(*shadow.context)) {
    if (bind->bind_info.mr && mw->pd != bind->bind_info.mr->pd) return EPERM;
    if (bind->bind_info.mw_access_flags & IBV_ACCESS_ZERO_BASED) return EINVAL;
    ibv_send_wr wr{}, *bad;
    wr.wr_id = bind->wr_id;
    wr.opcode = IBV_WR_BIND_MW;
    wr.send_flags = bind->send_flags;
    wr.bind_mw = {.mw = mw, .rkey = ibv_inc_rkey(mw->rkey), .bind_info = bind->bind_info};
    if (!wr.bind_mw.bind_info.mr) wr.bind_mw.bind_info.mr = no_memory();
    const int err = path::post_send(qp, &wr, &bad);
    if (!err) mw->rkey = wr.bind_mw.rkey;
    return err;
  }
  ibv_mw_bind mine = *bind;
  if (bind->bind_info.mr) mine.bind_info.mr = shadow_of(bind->bind_info.mr).real;
  return shadow.context->ops.bind_mw(shadow.real, mw, &mine);
}

/* ---- context -------------------------------------------------------------- */

/// Of a device that is being opened: who holds changes waits for its end.
void adopt_context(ibv_context* ctx) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  auto* context = new (std::nothrow) Context;
  if (!context) return;  // goes on without us
  context->real = ctx;
  context->ops = ctx->ops;
  context->kernel = std::make_unique<KernelLink>(ctx->cmd_fd);
  if (!context->kernel->has_tables()) return delete context;
  MIGR_TAKE_SLOT(*context, *ctx, create_qp_ex);
  MIGR_TAKE_SLOT(*context, *ctx, create_cq_ex);
  install_slots(*context, *ctx);
  install_srq(*context, *ctx);
  ctx->ops.post_send = path::post_send;
  ctx->ops.post_recv = path::post_recv;
  ctx->ops.poll_cq = path::poll_cq;
  ctx->ops.req_notify_cq = req_notify_cq;
  if (ctx->ops.bind_mw) ctx->ops.bind_mw = bind_mw;
  registry.contexts.push_back(context);
  {
    std::lock_guard events_guard(registry.events_lock);
    registry.with_events.push_back(ctx);
  }
  note_uverbs_fd(ctx->cmd_fd, true);
  control::start();
  links::opened(*context);
  if (context->twin || environment::force_protected()) ctx->ops.poll_cq = path::poll_protected;
}

/// Of one that is being closed.
void drop_context(ibv_context* ctx) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  Context* context = registry.context_of(ctx);
  if (!context) return;
  ++registry.changes;  // once more: a drain may have looked since it began
  note_uverbs_fd(ctx->cmd_fd, false);
  // What the application has not destroyed is gone with the context. As with libibverbs, its memory is not given back.
  const auto in_it = [&](const auto* shadow) { return shadow->context == context; };
  const auto of_it = [&](const auto* object) { return object->context == ctx; };
  for (QpShadow* qp : registry.qps)
    if (qp->context == context) datagrams::gone(*qp);
  links::dropped(*context);
  datagrams::dropped(*context);
  windows::dropped(*context);
  const auto drop = [&](auto& shadows) {
    std::lock_guard events_guard(registry.events_lock);
    for (const auto* shadow : shadows)
      if (in_it(shadow)) registry.shadows.erase(&shadow->app);
    std::erase_if(shadows, in_it);
  };
  drop(registry.qps);
  drop(registry.cqs);
  drop(registry.srqs);
  for (MrShadow* mr : std::vector(registry.mrs.begin(), registry.mrs.end())) {
    if (!in_it(mr)) continue;
    note_written(registry, *mr, mr->app);
    registry.mrs.remove(mr);
  }
  std::erase_if(registry.pds, of_it);
  for (const ibv_pd* pd : std::vector(registry.parent_domains))
    if (pd->context == ctx) parent_domain_gone(registry, pd);
  xrc_domains_gone(registry, *context);
  std::erase_if(registry.channels, of_it);
  forget(registry.contexts, context);
  events::dropped(*ctx);
  {
    std::lock_guard events_guard(registry.events_lock);
    std::erase(registry.with_events, ctx);
  }
  delete context;
}

}  // namespace
}  // namespace migr

/* ---- the exported names ----------------------------------------------------- */

using namespace migr;

MIGR_EXPORT ibv_context* ibv_open_device(ibv_device* device) {
  if (environment::disabled()) return real().open_device(device);
  control::begin();  // before the lock is taken for the first time, which a fork would catch
  const Asking opening;
  ibv_context* ctx = real().open_device(device);
  if (ctx) adopt_context(ctx);
  return ctx;
}

MIGR_EXPORT int ibv_close_device(ibv_context* ctx) {
  links::wait_for_discards();
  const Asking closing;
  drop_context(ctx);
  return real().close_device(ctx);
}

MIGR_EXPORT ibv_pd* ibv_alloc_pd(ibv_context* ctx) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  ibv_pd* pd = real().alloc_pd(ctx);
  if (pd && registry.context_of(ctx)) registry.pds.push_back(pd);
  return pd;
}

MIGR_EXPORT int ibv_dealloc_pd(ibv_pd* pd) {
  links::wait_for_discards();
  Registry& registry = Registry::get();
  auto guard = registry.change();
  links::gone(pd);
  const int err = real().dealloc_pd(pd);
  if (!err) forget(registry.pds, pd), parent_domain_gone(registry, pd);
  return err;
}

MIGR_EXPORT ibv_mr* ibv_reg_mr(ibv_pd* pd, void* addr, size_t length, int access) {
  if (inside_real) return real().reg_mr(pd, addr, length, access);
  return register_mr(pd, access, reinterpret_cast<std::uintptr_t>(addr), true,
                     [&] { return real().reg_mr(pd, addr, length, access); });
}

MIGR_EXPORT ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* addr, size_t length, uint64_t iova, int access) {
  if (inside_real) return real().reg_mr_iova(pd, addr, length, iova, access);
  return register_mr(pd, access, iova, true, [&] { return real().reg_mr_iova(pd, addr, length, iova, access); });
}

MIGR_EXPORT ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* addr, size_t length, uint64_t iova, unsigned access) {
  if (inside_real) return real().reg_mr_iova2(pd, addr, length, iova, access);
  return register_mr(pd, static_cast<int>(access), iova, true,
                     [&] { return real().reg_mr_iova2(pd, addr, length, iova, access); });
}

MIGR_EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  return register_mr(pd, access, iova, false,
                     [&] { return real().reg_dmabuf_mr(pd, offset, length, iova, fd, access); });
}

MIGR_EXPORT ibv_mr* ibv_import_mr(ibv_pd* pd, uint32_t handle) {
  return register_mr(pd, 0, 0, false, [&] { return real().import_mr(pd, handle); });
}

MIGR_EXPORT void ibv_unimport_mr(ibv_mr* mr) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  MrShadow* shadow = known(registry, mr);
  if (shadow) links::gone(*shadow);
  real().unimport_mr(shadow ? shadow->real : mr);
  if (!shadow) return;
  registry.mrs.remove(shadow);
  delete shadow;
}

MIGR_EXPORT int ibv_rereg_mr(ibv_mr* mr, int flags, ibv_pd* pd, void* addr, size_t length, int access) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  MrShadow* shadow = known(registry, mr);
  if (!shadow) return real().rereg_mr(mr, flags, pd, addr, length, access);
  const ibv_mr name = shadow->app, before = *shadow->real;
  ++registry.registrations;
  const int err = real().rereg_mr(shadow->real, flags, pd, addr, length, access);
  // The last error comes after the device has done it: only the old memory could not be given back to children. After the others what is on
  // backup links stays, too: work requests that are under way there name it.
  if (err && err != IBV_REREG_MR_ERR_DO_FORK_OLD) return err;
  links::gone(*shadow);  // by its old names; made anew below
  const ibv_mr& now = *shadow->real;
  note_written(registry, *shadow, name);
  shadow->app = now;
  std::memcpy(shadow->behind, shadow->real + 1, sizeof shadow->behind);
  if (flags & IBV_REREG_MR_CHANGE_ACCESS) {
    shadow->movable = (shadow->movable || (shadow->access & IBV_ACCESS_ON_DEMAND)) && !(access & IBV_ACCESS_ON_DEMAND);
    shadow->access = access;
  }
  if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) shadow->iova = reinterpret_cast<std::uintptr_t>(addr);
  note_pinned(registry, *shadow);
  if (now.lkey == before.lkey && now.rkey == before.rkey) {
    // The device calls it as before, so it is called as before: peers may go on with the key that they have.
    shadow->app.lkey = name.lkey;
    shadow->app.rkey = name.rkey;
  } else {
    retire_keys(registry, name, before);
    datagrams::note_shift(*shadow->context, name.lkey, 0);
    name_mr(*shadow);
  }
  note_shift(*shadow);
  if (const int missed = links::made(*shadow)) {  // the application is told, as by ibv_reg_mr: it is not to use it
    errno = missed;
    return IBV_REREG_MR_ERR_CMD;
  }
  return err;
}

MIGR_EXPORT int ibv_dereg_mr(ibv_mr* mr) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  MrShadow* shadow = inside_real ? nullptr : known(registry, mr);
  if (!shadow) return real().dereg_mr(mr);
  // Who registers memory while we are in the driver may get its keys: nothing is called by them any more.
  const bool retired = retire_keys(registry, shadow->app, *shadow->real);
  datagrams::note_shift(*shadow->context, shadow->app.lkey, 0);
  const std::vector<ibv_mr*> twins = links::take_twins(*shadow);
  registry.mrs.remove(shadow);
  const Registering registering(registry);
  const int err = without_lock(guard, [&] {
    for (ibv_mr* twin : twins) real().dereg_mr(twin);
    return real().dereg_mr(shadow->real);
  });
  if (err) {
    if (retired) registry.retired_keys.erase(shadow->app.rkey >> 8);
    note_shift(*shadow);
    registry.mrs.add(shadow);
    return made_again(*shadow), err;
  }
  note_written(registry, *shadow, shadow->app);
  delete shadow;
  return 0;
}

MIGR_EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* ctx) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  ibv_comp_channel* channel = real().create_comp_channel(ctx);
  if (channel && registry.context_of(ctx)) registry.channels.push_back(channel);
  return channel;
}

MIGR_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  const int err = real().destroy_comp_channel(channel);
  if (!err) forget(registry.channels, channel);
  return err;
}

MIGR_EXPORT ibv_cq* ibv_create_cq(ibv_context* ctx, int cqe, void* cq_context, ibv_comp_channel* channel, int vector) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  Context* context = registry.context_of(ctx);
  if (!context) return real().create_cq(ctx, cqe, cq_context, channel, vector);
  CqShadow* shadow = new_cq(*context);
  if (!shadow) {
    errno = ENOMEM;
    return nullptr;
  }
  ibv_cq* cq = nullptr;
  make_roomy(*context, cqe, [&](int entries) {
    cq = events::with_kernel_fd(*ctx, [&] { return real().create_cq(ctx, entries, shadow, channel, vector); });
    return cq != nullptr;
  });
  if (!cq) {
    delete shadow;
    return nullptr;
  }
  adopt_cq(registry, *shadow, cq, cq_context);
  links::changed();
  return &shadow->app;
}

namespace {

/// A call to the provider that may wait for a session of ibv_start_poll() on that CQ to end, while the session's thread waits for the Registry's lock:
/// so that is given away meanwhile, and no checkpoint begins.
template <class Call>
auto beside_sessions(Registry& registry, std::unique_lock<std::mutex>& guard, const CqShadow& c, Call&& call) {
  if (!c.real_ex) return call();
  ++registry.ending;
  const auto result = without_lock(guard, call);
  --registry.ending;
  registry.thawed.notify_all();
  return result;
}

}  // namespace

MIGR_EXPORT int ibv_resize_cq(ibv_cq* cq, int cqe) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  CqShadow* shadow = known(registry, cq);
  if (!shadow) return real().resize_cq(cq, cqe);
  int err = 0;
  const auto resize = [&](int entries) { return !(err = beside_sessions(registry, guard, *shadow, [&] { return real().resize_cq(shadow->real, entries); })); };
  const std::uint64_t least = cqe < 1 ? 0 : std::min<std::uint64_t>(links::room_of_protected(*shadow), INT_MAX);
  if (least <= static_cast<std::uint64_t>(cqe) || !resize(static_cast<int>(least))) make_roomy(*shadow->context, cqe, resize);
  shadow->app.cqe = shadow->real->cqe;
  if (!err) links::resized(*shadow);
  return err;
}

MIGR_EXPORT int ibv_destroy_cq(ibv_cq* cq) {
  const NoCancel no_cancel;  // it is either there or not
  links::wait_for_discards();
  Registry& registry = Registry::get();
  CqShadow* shadow;
  {
    auto guard = registry.change();
    shadow = known(registry, cq);
    if (shadow) {
      links::gone(*shadow);
      shadow->ending = true;
      ++registry.ending;
    }
  }
  if (!shadow) return real().destroy_cq(cq);
  // Not under the lock: it waits until the application has acknowledged its events.
  const int err = real().destroy_cq(shadow->real);
  {
    std::lock_guard guard(registry.lock);
    if (!err) forget(registry.cqs, shadow);
    else shadow->ending = false;
    --registry.ending;
  }
  registry.thawed.notify_all();
  if (err) return err;
  forget_shadow(registry, *shadow);
  delete shadow;
  return 0;
}

MIGR_EXPORT int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) {
  Registry& registry = Registry::get();
  // Not under the Registry's lock if it can be helped: a call of another thread, that waits for another host, holds it for long.
  for (;;) {
    const std::uint64_t turns = WithoutWaiting::turns();
    const int err = real().get_cq_event(channel, cq, cq_context);
    if (!err) break;
    if (errno != EAGAIN || (turns % 2 == 0 && turns == WithoutWaiting::turns())) return err;
    std::lock_guard guard(registry.lock);  // FREEZE reads under it
    errno = EAGAIN;
    if (!is_to_wait(channel->fd)) return err;
  }
  if (!registry.is_shadow(*cq_context)) return 0;
  auto* shadow = static_cast<CqShadow*>(*cq_context);
  {
    std::lock_guard cq_guard(shadow->lock);
    if (shadow->armed) shadow->arm_unsure = --shadow->armed > 0;
    ++shadow->events_read;
  }
  *cq = &shadow->app;
  *cq_context = shadow->app.cq_context;
  return 0;
}

MIGR_EXPORT void ibv_ack_cq_events(ibv_cq* cq, unsigned events) {
  real().ack_cq_events(Registry::get().is_shadow(cq) ? shadow_of(cq).real : cq, events);
}

MIGR_EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) {
  Registry& registry = Registry::get();
  auto guard = registry.change();
  Context* context = registry.context_of(pd->context);
  if (!context) return real().create_qp(pd, attr);
  auto* shadow = new (std::nothrow) QpShadow{};
  if (!shadow) {
    errno = ENOMEM;
    return nullptr;
  }
  shadow->init = widened(*attr, pd);
  ibv_qp_init_attr mine = *attr;
  mine.qp_context = shadow;
  mine.send_cq = real_cq(attr->send_cq);
  mine.recv_cq = real_cq(attr->recv_cq);
  mine.srq = real_srq(attr->srq);
  make_roomy(*context, mine.qp_type, mine.srq, mine.cap);
  ibv_qp* qp = create_numbered(registry, *context, mine, [&](ibv_qp_init_attr& a) {
    return events::with_kernel_fd(*pd->context, [&] { return real().create_qp(pd, &a); });
  });
  if (!qp) {
    delete shadow;
    return nullptr;
  }
  attr->cap = shadow->cap = mine.cap;
  return adopt_qp(registry, *context, *shadow, qp);
}

namespace {

/// The path that is made ahead for a migration of the other end was made of what this one was then. One that cannot become as it
/// goes: SWITCH then fails, and the migration goes back.
void change_spare(QpShadow& q, ibv_qp_attr& mine, int mask) {
  if (!q.spare || ((mask & IBV_QP_STATE) && mine.qp_state == IBV_QPS_ERR)) return;  // what is broken stays so
  if ((mask & IBV_QP_STATE) || real().modify_qp(q.spare, &mine, mask)) real().destroy_qp(std::exchange(q.spare, nullptr));
}

/// Its partner's drain marker, a write, may be to come, also when the migration was taken back. To a new path (SWITCH) none comes.
bool awaits_marker(const QpShadow& q) {
  const bool suspended = q.phase == switchover::Phase::kSuspended || q.phase == switchover::Phase::kDrained;
  const bool connected = q.real->state == IBV_QPS_RTS && (q.app.qp_type == IBV_QPT_RC || q.app.qp_type == IBV_QPT_UC);
  return ((suspended && connected) || q.write_access_added) && !q.old_real && !q.cut && !q.adrift;
}

/// The first PSN of its sends is fixed by now, and not the one that the other end awaits; and so are its timers.
int stop_responding_only(QpShadow& q) {
  if (q.phase != switchover::Phase::kRunning || q.cut) return EBUSY;
  std::string why;
  const int err = switchover::back_to_rtr(q, why);
  q.app.state = q.app_state();
  if (err) std::fprintf(stderr, "libmigr: %s\n", why.c_str());
  return err;
}

int modify(QpShadow* shadow, ibv_qp_attr* attr, int mask, const whereabouts::Connecting& peer) {
  const bool sends = (mask & IBV_QP_STATE) && attr->qp_state == IBV_QPS_RTS && shadow->app.state == IBV_QPS_RTR;
  if (sends && links::has_changed(*shadow)) {
    shadow->responder_only = false;
    shadow->told_psn.reset();
    shadow->app.state = IBV_QPS_RTS;  // as its path is already
    mask &= IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER;
    if (!mask) return 0;
  }
  if (sends && shadow->responder_only)
    if (const int err = stop_responding_only(*shadow)) return err;
  if (mask & IBV_QP_STATE) links::leave(*shadow, attr->qp_state);
  ibv_qp_attr mine = *attr;
  if (sends && shadow->told_psn) mine.sq_psn = *shadow->told_psn;
  if (!peer.put(mine) && (mask & IBV_QP_DEST_QPN) && renamed(*shadow->real)) mine.dest_qp_num ^= kForcedQpnBit;
  if (mask & IBV_QP_AV) mine.ah_attr.grh.sgid_index = gids::here(*shadow->context, mine.ah_attr.port_num, mine.ah_attr.grh.sgid_index);
  const bool grants = (mask & IBV_QP_ACCESS_FLAGS) && (attr->qp_access_flags & IBV_ACCESS_REMOTE_WRITE);
  const bool adds_write = (mask & IBV_QP_ACCESS_FLAGS) && !grants && awaits_marker(*shadow);
  if (adds_write) mine.qp_access_flags |= IBV_ACCESS_REMOTE_WRITE;
  const int err = real().modify_qp(shadow->real, &mine, mask);
  if (!err && (mask & IBV_QP_STATE)) {
    shadow->responder_only = false;
    shadow->told_psn.reset();
  }
  shadow->app.state = shadow->app_state();
  if (err) return err;
  if (grants || adds_write) shadow->write_access_added = adds_write;
  if (adds_write) mine.qp_access_flags = attr->qp_access_flags;
  change_spare(*shadow, mine, mask);
  switchover::change_old_path(*shadow, mine, mask);
  if ((mask & IBV_QP_STATE) && attr->qp_state == IBV_QPS_RESET) {
    shadow->write_access_added = false;  // nor is any other there; INIT asks for all anew
    datagrams::emptied(shadow->awaited);
    if (shadow->phase == switchover::Phase::kRunning) switchover::forget_posted(*shadow);
    events::hush(*shadow, nullptr);
    if (shadow->remote_keys) whereabouts::parted(*shadow);
  }
  if (mask & IBV_QP_DEST_QPN) shadow->birth.dest_qp_num = attr->dest_qp_num;
  if (mask & IBV_QP_AV) shadow->birth.ah = attr->ah_attr;
  if (mask & IBV_QP_PATH_MTU) shadow->birth.path_mtu = attr->path_mtu;
  if (mask & IBV_QP_ACCESS_FLAGS) shadow->access_flags = static_cast<int>(attr->qp_access_flags);
  shadow->birth.mask |= mask & (IBV_QP_DEST_QPN | IBV_QP_AV);
  links::modified(*shadow, *attr, mask);
  return 0;
}

}  // namespace

namespace {

/// A connection that its application ends while a migration changes its path would stand again on the new one. So it ends on
/// that, or on the old one if the migration is taken back. One that has only answered goes to RTS there, too. Who waits for longer than any
/// migration goes on as it is.
/// @param guard  of the registry's lock, which is given away meanwhile. @return false: the lock has to be taken anew
bool wait_for_migration(Registry& registry, std::unique_lock<std::mutex>& guard, ibv_qp* qp, ibv_qp_state to) {
  constexpr std::chrono::seconds kLimit{120};
  const auto over = [&] {
    const QpShadow* q = known(registry, qp);
    return !q || q->phase == switchover::Phase::kRunning || q->adrift || links::changing(*q) || (to == IBV_QPS_RTS && q->app_state() != IBV_QPS_RTR);
  };
  if (over()) return true;
  return !registry.thawed.wait_for(guard, kLimit, over);
}

/// Whatever else is changed while its links are being changed.
/// @return false: it has waited, and the lock has to be taken anew
bool wait_for_path(Registry& registry, std::unique_lock<std::mutex>& guard, ibv_qp* qp) {
  constexpr std::chrono::milliseconds kLook{2};
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(links::change_limit_ms());
  for (bool waited = false;; waited = true) {
    QpShadow* const q = known(registry, qp);
    if (!q || !links::between_paths(*q)) return !waited;
    if (std::chrono::steady_clock::now() > until) return true;
    registry.thawed.wait_for(guard, kLook);
  }
}

}  // namespace

MIGR_EXPORT int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  const NoCancel no_cancel;
  Registry& registry = Registry::get();
  whereabouts::Connecting peer(qp, *attr, mask);
  const bool ends = (mask & IBV_QP_STATE) && (attr->qp_state == IBV_QPS_ERR || attr->qp_state == IBV_QPS_RESET);
  const bool waits = ends || ((mask & IBV_QP_STATE) && attr->qp_state == IBV_QPS_RTS);
  std::unique_lock<std::mutex> guard;
  do {
    if (guard) guard.unlock();
    peer.look_up();
    if (mask & IBV_QP_AV) {
      ibv_qp_attr mine = *attr;
      peer.put(mine);
      int err = links::ask_neighbour(qp, mine.ah_attr);
      if (!err) err = links::wait_for_receives(qp);
      if (err) return err;
    }
    guard = registry.change();
  } while (peer.stale() || (waits && !wait_for_migration(registry, guard, qp, attr->qp_state)) || (!ends && !wait_for_path(registry, guard, qp)));
  QpShadow* shadow = known(registry, qp);
  if (!shadow) return real().modify_qp(qp, attr, mask);
  const int err = modify(shadow, attr, mask, peer);
  if (err) return err;
  peer.connected(*shadow);
  guard.unlock();
  peer.introduce();
  return 0;
}

MIGR_EXPORT int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) {
  Registry& registry = Registry::get();
  auto guard = registry.enter();
  QpShadow* shadow = known(registry, qp);
  if (!shadow) return real().query_qp(qp, attr, mask, init);
  const ibv_qp_state state = shadow->real->state;
  const int err = real().query_qp(shadow->real, attr, mask, init);
  if (err) return err;
  if (links::hides_errors(*shadow) && attr->qp_state == IBV_QPS_ERR) attr->qp_state = attr->cur_qp_state = shadow->real->state = state;
  const bool of_the_cut = attr->qp_state == IBV_QPS_RESET || attr->qp_state == IBV_QPS_INIT;
  if (shadow->cut && of_the_cut) attr->qp_state = attr->cur_qp_state = shadow->real->state = state;
  init->qp_context = shadow->app.qp_context;
  init->send_cq = shadow->app.send_cq;
  init->recv_cq = shadow->app.recv_cq;
  init->srq = shadow->app.srq;
  if (shadow->write_access_added) attr->qp_access_flags &= ~static_cast<unsigned>(IBV_ACCESS_REMOTE_WRITE);
  if (shadow->birth.mask & IBV_QP_DEST_QPN) attr->dest_qp_num = shadow->birth.dest_qp_num;
  if (shadow->birth.mask & IBV_QP_AV) {
    attr->ah_attr.grh.dgid = shadow->birth.ah.grh.dgid;
    attr->ah_attr.grh.sgid_index = shadow->birth.ah.grh.sgid_index;
  }
  if (links::on_backup(*shadow)) {
    attr->ah_attr = shadow->birth.ah;
    attr->port_num = shadow->birth.ah.port_num;
  }
  if (shadow->responder_only && attr->qp_state == IBV_QPS_RTS) attr->qp_state = attr->cur_qp_state = IBV_QPS_RTR;
  shadow->app.state = shadow->app_state();
  return 0;
}

namespace {

int destroy_paths(const QpShadow& q) {
  if (const int err = real().destroy_qp(q.real)) return err;
  for (ibv_qp* other : {q.old_real, q.spare})
    if (other) real().destroy_qp(other);
  return 0;
}

/// Without the lock where there are backup links: it may wait for one that has failed, for seconds, and changes of paths of others do not wait
/// for that. Nor where its completions may be being read in a session, as in beside_sessions().
int destroy(Registry& registry, QpShadow& q, std::unique_lock<std::mutex>& guard) {
  const bool beside = (q.send_cq && q.send_cq->real_ex) || (q.recv_cq && q.recv_cq->real_ex);
  if (!q.context->twin && !beside) return destroy_paths(q);
  ++registry.ending;
  guard.unlock();
  const int err = destroy_paths(q);
  guard.lock();
  --registry.ending;
  registry.thawed.notify_all();
  return err;
}

}  // namespace

MIGR_EXPORT int ibv_destroy_qp(ibv_qp* qp) {
  Registry& registry = Registry::get();
  wait_for_handlers(registry, qp);
  QpShadow* shadow;
  {
    auto guard = registry.change();
    shadow = known(registry, qp);
    if (!shadow) return real().destroy_qp(qp);
    links::gone(*shadow);
    forget(registry.qps, shadow);
    if (shadow->tracked) registry.tracking_failed = true;  // who asks for the notes while the lock is given away hears that some are missing
    switchover::name_completions(*shadow);
    if (const int err = destroy(registry, *shadow, guard)) {  // it is still there
      registry.qps.push_back(shadow);
      links::changed();
      return err;
    }
    switchover::forget_posted(*shadow);
    datagrams::gone(*shadow);
    windows::gone(*shadow);
  }
  forget_shadow(registry, *shadow);
  delete shadow;
  return 0;
}

MIGR_EXPORT ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) {
  Registry& registry = Registry::get();
  std::lock_guard guard(registry.lock);
  QpShadow* shadow = known(registry, qp);
  if (!shadow) return real().qp_to_qp_ex(qp);
  if (shadow->immovable) return shadow->real_ex;
  return shadow->real_ex ? &shadow->app_ex : nullptr;
}

// Calls that only name a QP.
#define MIGR_ON_REAL_QP(name, params, ...)                         \
  MIGR_EXPORT int ibv_##name params {                              \
    Registry& registry = Registry::get();                          \
    auto guard = registry.enter();                                 \
    if (QpShadow* shadow = known(registry, qp)) qp = shadow->real; \
    return real().name(__VA_ARGS__);                               \
  }
MIGR_ON_REAL_QP(query_qp_data_in_order, (ibv_qp * qp, ibv_wr_opcode op, uint32_t flags), qp, op, flags)
MIGR_ON_REAL_QP(query_ece, (ibv_qp * qp, ibv_ece* ece), qp, ece)
MIGR_ON_REAL_QP(set_ece, (ibv_qp * qp, ibv_ece* ece), qp, ece)
