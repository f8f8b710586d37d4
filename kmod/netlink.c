// SPDX-License-Identifier: GPL-2.0
/*
 * Generic netlink family "migr": parses, asks the record or the names, replies.
 *
 * A caller needs CAP_NET_ADMIN over its socket's network namespace, and over the
 * user namespace of the process that a context belongs to; and unless it is the
 * host's, that network namespace has to be the process's own. So a container that
 * was given CAP_NET_ADMIN sees what is in it. The numbers reserved are the host's,
 * and so are the events: for the initial namespaces only.
 */
#include <linux/pid_namespace.h>
#include <linux/sched.h>
#include <net/genetlink.h>
#include <net/net_namespace.h>
#include <net/sock.h>

#include "migr.h"

static struct genl_family migr_family;

static struct netlink_range_validation qpn_range = { .min = 0, .max = MIGR_QPN_MASK };

static const struct nla_policy none_policy[MIGR_A_MAX + 1];
static const struct nla_policy ctx_get_policy[MIGR_A_MAX + 1] = {
	[MIGR_A_PID] = NLA_POLICY_MIN(NLA_U32, 1),
};
static const struct nla_policy obj_get_policy[MIGR_A_MAX + 1] = {
	[MIGR_A_CTX_ID] = NLA_POLICY_MIN(NLA_U32, 1),
	[MIGR_A_OBJ_TYPE] = NLA_POLICY_RANGE(NLA_U32, MIGR_OBJ_PD, __MIGR_OBJ_MAX - 1),
};
static const struct nla_policy qp_bind_policy[MIGR_A_MAX + 1] = {
	[MIGR_A_CTX_ID] = NLA_POLICY_MIN(NLA_U32, 1),
	[MIGR_A_VQPN] = NLA_POLICY_FULL_RANGE(NLA_U32, &qpn_range),
	[MIGR_A_PQPN] = NLA_POLICY_FULL_RANGE(NLA_U32, &qpn_range),
};
static const struct nla_policy vqpn_policy[MIGR_A_MAX + 1] = {
	[MIGR_A_VQPN] = NLA_POLICY_FULL_RANGE(NLA_U32, &qpn_range),
};

static bool may_see(struct sk_buff *skb, const struct migr_ctx *ctx)
{
	const struct net *net = sock_net(skb->sk);
	bool may;

	mutex_lock(&migr_lock);		/* the owner changes with ATTACH */
	may = (net == &init_net || net->net_cookie == ctx->netns) &&
	      netlink_ns_capable(skb, ctx->user_ns, CAP_NET_ADMIN);
	mutex_unlock(&migr_lock);
	return may;
}

/* ---- info ------------------------------------------------------------------ */

static int info_get(struct sk_buff *skb, struct genl_info *info)
{
	u32 nr_ctx, nr_obj;
	struct sk_buff *msg;
	void *hdr;

	migr_record_count(&nr_ctx, &nr_obj);
	msg = genlmsg_new(NLMSG_GOODSIZE, GFP_KERNEL);
	if (!msg)
		return -ENOMEM;
	hdr = genlmsg_put_reply(msg, info, &migr_family, 0, MIGR_CMD_INFO_GET);
	if (!hdr || nla_put_u32(msg, MIGR_A_ABI_VERSION, MIGR_ABI_VERSION) ||
	    nla_put_u32(msg, MIGR_A_NR_CTX, nr_ctx) ||
	    nla_put_u32(msg, MIGR_A_NR_OBJ, nr_obj) ||
	    nla_put_u32(msg, MIGR_A_NR_RESERVED, migr_nr_reserved()) ||
	    nla_put_u32(msg, MIGR_A_NR_DEV, atomic_read(&migr_nr_dev)) ||
	    nla_put_u32(msg, MIGR_A_MOVES_MARKED, migr_moves_marked())) {
		nlmsg_free(msg);
		return -EMSGSIZE;
	}
	genlmsg_end(msg, hdr);
	return genlmsg_reply(msg, info);
}

/* ---- dumps ----------------------------------------------------------------- */

/* Kept in cb->args[]: where the dump goes on. */
enum { ARG_NEXT, ARG_FILTER, ARG_TYPE };

/* One u32 attribute of the request; @value stays as it is without it. */
static int dump_attr(struct netlink_callback *cb, const struct nla_policy *policy, int type,
		     u32 *value)
{
	struct nlattr *attrs[MIGR_A_MAX + 1];
	int err;

	err = genlmsg_parse(cb->nlh, &migr_family, attrs, MIGR_A_MAX, policy, cb->extack);
	if (!err && attrs[type])
		*value = nla_get_u32(attrs[type]);
	return err;
}

static int ctx_dump_start(struct netlink_callback *cb)
{
	u32 pid = 0;
	int err = dump_attr(cb, ctx_get_policy, MIGR_A_PID, &pid);

	cb->args[ARG_NEXT] = 0;
	cb->args[ARG_FILTER] = pid;
	return err;
}

static void ctx_record(struct migr_ctx *ctx, struct migr_ctx_rec *rec)
{
	memset(rec, 0, sizeof(*rec));
	mutex_lock(&migr_lock);
	rec->ctx_id = ctx->id;
	rec->flags = ctx->flags;
	rec->pid = migr_owner_locked(ctx, task_active_pid_ns(current));
	rec->nr_pd = ctx->nr[MIGR_OBJ_PD];
	rec->nr_mr = ctx->nr[MIGR_OBJ_MR];
	rec->nr_cq = ctx->nr[MIGR_OBJ_CQ];
	rec->nr_qp = ctx->nr[MIGR_OBJ_QP];
	rec->nr_srq = ctx->nr[MIGR_OBJ_SRQ];
	rec->nr_other = ctx->nr[MIGR_OBJ_MW] + ctx->nr[MIGR_OBJ_AH] + ctx->nr[MIGR_OBJ_XRCD] +
			ctx->nr[MIGR_OBJ_DM];
	rec->num_comp_vectors = ctx->num_comp_vectors;
	rec->mr_bytes = ctx->mr_bytes;
	strscpy(rec->comm, ctx->comm, sizeof(rec->comm));
	strscpy(rec->ibdev, ctx->ibdev_name, sizeof(rec->ibdev));
	mutex_unlock(&migr_lock);
}

static int ctx_dump(struct sk_buff *skb, struct netlink_callback *cb)
{
	u32 id = cb->args[ARG_NEXT], filter = cb->args[ARG_FILTER];
	struct migr_ctx_rec rec;
	struct migr_ctx *ctx;
	bool wanted;
	void *hdr;

	for (; (ctx = migr_ctx_get_next(&id)); id++) {
		wanted = may_see(cb->skb, ctx);
		ctx_record(ctx, &rec);
		migr_ctx_put(ctx);
		if (!wanted || (filter && rec.pid != filter))
			continue;
		hdr = genlmsg_put(skb, NETLINK_CB(cb->skb).portid, cb->nlh->nlmsg_seq, &migr_family,
				  NLM_F_MULTI, MIGR_CMD_CTX_GET);
		if (!hdr)
			break;
		if (nla_put_u32(skb, MIGR_A_CTX_ID, rec.ctx_id) ||
		    nla_put(skb, MIGR_A_CTX_REC, sizeof(rec), &rec)) {
			genlmsg_cancel(skb, hdr);
			break;
		}
		genlmsg_end(skb, hdr);
	}
	cb->args[ARG_NEXT] = id;
	return skb->len;
}

static int obj_dump_start(struct netlink_callback *cb)
{
	struct migr_ctx *ctx;
	u32 ctx_id = 0, type = 0;
	int err = dump_attr(cb, obj_get_policy, MIGR_A_CTX_ID, &ctx_id);

	if (!err)
		err = dump_attr(cb, obj_get_policy, MIGR_A_OBJ_TYPE, &type);
	if (err)
		return err;
	if (!ctx_id) {
		NL_SET_ERR_MSG(cb->extack, "the context (CTX_ID) is missing");
		return -EINVAL;
	}
	ctx = migr_ctx_get(ctx_id);
	if (!ctx) {
		NL_SET_ERR_MSG(cb->extack, "no such context");
		return -ENOENT;
	}
	if (!may_see(cb->skb, ctx))
		err = -EPERM;
	migr_ctx_put(ctx);
	cb->args[ARG_NEXT] = 0;
	cb->args[ARG_FILTER] = ctx_id;
	cb->args[ARG_TYPE] = type;
	return err;
}

static size_t rec_size(const struct migr_obj *obj)
{
	switch (obj->type) {
	case MIGR_OBJ_PD:
		return sizeof(obj->rec.pd);
	case MIGR_OBJ_MR:
		return sizeof(obj->rec.mr);
	case MIGR_OBJ_CQ:
		return sizeof(obj->rec.cq);
	case MIGR_OBJ_QP:
		return sizeof(obj->rec.qp);
	case MIGR_OBJ_SRQ:
		return sizeof(obj->rec.srq);
	default:
		return sizeof(obj->rec.other);
	}
}

static int obj_put(struct sk_buff *skb, struct netlink_callback *cb, const struct migr_obj *obj)
{
	void *hdr;

	hdr = genlmsg_put(skb, NETLINK_CB(cb->skb).portid, cb->nlh->nlmsg_seq, &migr_family,
			  NLM_F_MULTI, MIGR_CMD_OBJ_GET);
	if (!hdr)
		return -EMSGSIZE;
	genl_dump_check_consistent(cb, hdr);
	if (nla_put_u32(skb, MIGR_A_OBJ_TYPE, obj->type) ||
	    nla_put(skb, MIGR_A_OBJ_REC, rec_size(obj), &obj->rec) ||
	    (obj->resp_len && nla_put(skb, MIGR_A_DRIVER_RESP, obj->resp_len, obj->resp))) {
		genlmsg_cancel(skb, hdr);
		return -EMSGSIZE;
	}
	genlmsg_end(skb, hdr);
	return 0;
}

/* In order of creation: what an object was made from comes before it. */
static int obj_dump(struct sk_buff *skb, struct netlink_callback *cb)
{
	struct migr_ctx *ctx = migr_ctx_get(cb->args[ARG_FILTER]);
	unsigned long seq = cb->args[ARG_NEXT];
	u32 type = cb->args[ARG_TYPE];
	struct migr_obj *obj;

	if (!ctx)
		return -ENOENT;
	mutex_lock(&migr_lock);
	if (!migr_ctx_is_there_locked(ctx)) {
		mutex_unlock(&migr_lock);
		migr_ctx_put(ctx);
		return -ENOENT;		/* as if it were gone already */
	}
	/* A change between two parts makes the dump an interrupted one. */
	cb->seq = ctx->gen ?: 1;
	xa_for_each_start(&ctx->objs, seq, obj, cb->args[ARG_NEXT]) {
		if (type && obj->type != type)
			continue;
		if (!migr_obj_refresh_locked(obj))
			continue;
		if (obj_put(skb, cb, obj))
			break;
	}
	cb->args[ARG_NEXT] = obj ? seq : ctx->next_seq;
	mutex_unlock(&migr_lock);
	migr_ctx_put(ctx);
	return skb->len;
}

/* ---- changes --------------------------------------------------------------- */

static int want(struct genl_info *info, int type)
{
	if (info->attrs[type])
		return 0;
	NL_SET_ERR_MSG(info->extack, "an attribute that this command needs is missing");
	return -EINVAL;
}

static int qp_bind(struct sk_buff *skb, struct genl_info *info)
{
	struct migr_ctx *ctx;
	int err;

	if (want(info, MIGR_A_CTX_ID) || want(info, MIGR_A_VQPN) || want(info, MIGR_A_PQPN))
		return -EINVAL;
	ctx = migr_ctx_get(nla_get_u32(info->attrs[MIGR_A_CTX_ID]));
	if (!ctx) {
		NL_SET_ERR_MSG_ATTR(info->extack, info->attrs[MIGR_A_CTX_ID], "no such context");
		return -ENOENT;
	}
	err = -EPERM;
	if (may_see(skb, ctx))
		err = migr_bind_qp(ctx, nla_get_u32(info->attrs[MIGR_A_VQPN]),
				   nla_get_u32(info->attrs[MIGR_A_PQPN]));
	if (err == -ENOENT)
		NL_SET_ERR_MSG_ATTR(info->extack, info->attrs[MIGR_A_PQPN],
				    "the context has no QP of this number");
	migr_ctx_put(ctx);
	return err;
}

static int qpn_change(struct sk_buff *skb, struct genl_info *info, int (*change)(u32 vqpn))
{
	int err;

	if (genl_info_net(info) != &init_net || !netlink_capable(skb, CAP_NET_ADMIN))
		return -EPERM;
	if (want(info, MIGR_A_VQPN))
		return -EINVAL;
	err = change(nla_get_u32(info->attrs[MIGR_A_VQPN]));
	if (err)
		NL_SET_BAD_ATTR(info->extack, info->attrs[MIGR_A_VQPN]);
	return err;
}

static int qpn_reserve(struct sk_buff *skb, struct genl_info *info)
{
	int err = qpn_change(skb, info, migr_qpn_reserve);

	if (err == -EEXIST)
		NL_SET_ERR_MSG(info->extack, "this number is reserved already");
	return err;
}

static int qpn_release(struct sk_buff *skb, struct genl_info *info)
{
	int err = qpn_change(skb, info, migr_qpn_release);

	if (err == -ENOENT)
		NL_SET_ERR_MSG(info->extack, "this number is not reserved");
	return err;
}

/* ---- events ---------------------------------------------------------------- */

enum { MCGRP_EVENTS };

static const struct genl_multicast_group mcgrps[] = {
	[MCGRP_EVENTS] = { .name = MIGR_GENL_MCGRP_EVENTS, .flags = GENL_MCAST_CAP_NET_ADMIN },
};

/* Telling is a service, not a promise: without memory nobody is told. */
void migr_event(enum migr_event event, struct migr_ctx *ctx, u32 vqpn, u32 pqpn)
{
	struct sk_buff *msg;
	void *hdr;
	u32 pid;

	if (!genl_has_listeners(&migr_family, &init_net, MCGRP_EVENTS))
		return;
	mutex_lock(&migr_lock);		/* the owner changes with ATTACH */
	pid = migr_owner_locked(ctx, &init_pid_ns);
	mutex_unlock(&migr_lock);
	msg = genlmsg_new(NLMSG_GOODSIZE, GFP_KERNEL);
	if (!msg)
		return;
	hdr = genlmsg_put(msg, 0, 0, &migr_family, 0, MIGR_CMD_EVENT);
	if (!hdr || nla_put_u32(msg, MIGR_A_EVENT, event) ||
	    nla_put_u32(msg, MIGR_A_CTX_ID, ctx->id) ||
	    nla_put_u32(msg, MIGR_A_PID, pid) ||
	    (vqpn != MIGR_NO_QPN && (nla_put_u32(msg, MIGR_A_VQPN, vqpn) ||
				     nla_put_u32(msg, MIGR_A_PQPN, pqpn)))) {
		nlmsg_free(msg);
		return;
	}
	genlmsg_end(msg, hdr);
	genlmsg_multicast_netns(&migr_family, &init_net, msg, 0, MCGRP_EVENTS, GFP_KERNEL);
}

/* ---- family ---------------------------------------------------------------- */

static const struct genl_ops ops[] = {
	{
		.cmd = MIGR_CMD_INFO_GET,
		.policy = none_policy,
		.maxattr = MIGR_A_MAX,
		.doit = info_get,
	},
	{
		.cmd = MIGR_CMD_CTX_GET,
		.flags = GENL_UNS_ADMIN_PERM,
		.policy = ctx_get_policy,
		.maxattr = MIGR_A_MAX,
		.start = ctx_dump_start,
		.dumpit = ctx_dump,
	},
	{
		.cmd = MIGR_CMD_OBJ_GET,
		.flags = GENL_UNS_ADMIN_PERM,
		.policy = obj_get_policy,
		.maxattr = MIGR_A_MAX,
		.start = obj_dump_start,
		.dumpit = obj_dump,
	},
	{
		.cmd = MIGR_CMD_QP_BIND,
		.flags = GENL_UNS_ADMIN_PERM,
		.policy = qp_bind_policy,
		.maxattr = MIGR_A_MAX,
		.doit = qp_bind,
	},
	{
		.cmd = MIGR_CMD_QPN_RESERVE,
		.flags = GENL_UNS_ADMIN_PERM,
		.policy = vqpn_policy,
		.maxattr = MIGR_A_MAX,
		.doit = qpn_reserve,
	},
	{
		.cmd = MIGR_CMD_QPN_RELEASE,
		.flags = GENL_UNS_ADMIN_PERM,
		.policy = vqpn_policy,
		.maxattr = MIGR_A_MAX,
		.doit = qpn_release,
	},
};

static struct genl_family migr_family __ro_after_init = {
	.name = MIGR_GENL_NAME,
	.version = MIGR_GENL_VERSION,
	.maxattr = MIGR_A_MAX,
	.netnsok = true,
	.parallel_ops = true,	/* migr_lock is all that they need; other families need not wait behind it */
	.module = THIS_MODULE,
	.ops = ops,
	.n_ops = ARRAY_SIZE(ops),
	.mcgrps = mcgrps,
	.n_mcgrps = ARRAY_SIZE(mcgrps),
};

int migr_netlink_init(void)
{
	return genl_register_family(&migr_family);
}

void migr_netlink_exit(void)
{
	genl_unregister_family(&migr_family);
}
