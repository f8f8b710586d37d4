// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * The image on disk: an envelope around the protobuf messages of migr.proto.
 *
 *	magic 8 bytes, version u32, CRC-32 of the payload u32, payload length u64, payload
 *
 * all little-endian. The envelope is what tells a truncated or damaged file, and
 * one of another version, from a good one; protobuf alone cannot.
 */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"
#include "migr.pb-c.h"

struct envelope {
	char magic[8];
	uint32_t version;
	uint32_t crc;
	uint64_t bytes;
};

static const char image_magic[8] = "migrimg";
static const char files_magic[8] = "migrfil";

static uint32_t crc32_of(const uint8_t *p, size_t n)
{
	uint32_t crc = ~0u;

	while (n--) {
		crc ^= *p++;
		for (int i = 0; i < 8; i++)
			crc = (crc >> 1) ^ (0xedb88320u & -(crc & 1));
	}
	return ~crc;
}

/* ---- fields, listed once for both directions ------------------------------- */

#define FD_FIELDS(X) \
	X(kind) X(fd) X(context_fd) X(ctx_id) X(cq_handle) X(obj_type) X(obj_handle) X(ring) X(addr) X(bytes) X(pgoff)
#define CTX_FIELDS(X) X(ctx_id) X(flags) X(pid) X(num_comp_vectors) X(mr_bytes)
#define PD_FIELDS(X) X(handle)
#define MR_FIELDS(X) \
	X(handle) X(pd_handle) X(start) X(length) X(iova) X(access) X(vlkey) X(vrkey) X(plkey) X(prkey) X(flags)
#define CQ_FIELDS(X) X(handle) X(cqe) X(comp_vector) X(flags) X(channel) X(user_handle)
#define AH_FIELDS(X) \
	X(is_global) X(gid_type) X(flow_label) X(sgid_index) X(hop_limit) X(traffic_class) X(sl) X(src_path_bits) \
	X(static_rate) X(port_num) X(dlid)
#define QP_FIELDS(X) \
	X(handle) X(vqpn) X(pqpn) X(pd_handle) X(send_cq_handle) X(recv_cq_handle) X(srq_handle) X(qp_type) \
	X(user_handle) X(max_send_wr) X(max_recv_wr) X(max_send_sge) X(max_recv_sge) X(max_inline_data) \
	X(sq_sig_all) X(create_flags) X(attr_mask) X(qp_state) X(path_mtu) X(qkey) X(rq_psn) X(sq_psn) X(dest_qpn) \
	X(access_flags) X(pkey_index) X(port_num) X(timeout) X(retry_cnt) X(rnr_retry) X(min_rnr_timer) \
	X(max_rd_atomic) X(max_dest_rd_atomic) X(flags)
#define SRQ_FIELDS(X) \
	X(handle) X(pd_handle) X(num) X(srq_type) X(user_handle) X(max_wr) X(max_sge) X(srq_limit) X(cq_handle) X(flags)
#define OTHER_FIELDS(X) X(handle) X(pd_handle) X(num)
#define FILE_FIELDS(X) X(id) X(pid) X(ctx_id) X(kind) X(fd_number) X(nonblock) X(async)

#define COPY(f) to->f = from->f;

/* ---- pack ------------------------------------------------------------------ */

/* Memory of the messages while packing: blocks in a list, freed at once. */
struct arena {
	struct block {
		struct block *next;
	} *head;
};

static void *take(struct arena *a, size_t size)
{
	struct block *b = calloc(1, sizeof(*b) + 8 + size);

	if (!b)
		return NULL;
	b->next = a->head;
	a->head = b;
	return (char *)b + 16;
}

static void arena_free(struct arena *a)
{
	for (struct block *b = a->head, *next; b; b = next) {
		next = b->next;
		free(b);
	}
}

/* An array of n messages of Type and the pointer array that protobuf-c wants of it. */
#define TAKE_MESSAGES(a, Type, init, n, ptrs, out)                                  \
	do {                                                                        \
		(out) = take(a, ((size_t)(n) + 1) * sizeof(Type));                  \
		(ptrs) = take(a, ((size_t)(n) + 1) * sizeof(Type *));               \
		if (!(out) || !(ptrs))                                              \
			return -ENOMEM;                                             \
		for (size_t k_ = 0; k_ < (n); k_++) {                               \
			init(&(out)[k_]);                                           \
			(ptrs)[k_] = &(out)[k_];                                    \
		}                                                                   \
	} while (0)

static ProtobufCBinaryData bytes_of(const void *p, size_t len)
{
	return (ProtobufCBinaryData){ .len = len, .data = (uint8_t *)p };
}

static int pack_context(struct arena *a, const struct migr_rst_context *c, Migr__Context *m)
{
	{
		const struct migr_ctx_rec *from = &c->rec;
		Migr__Context *to = m;

		CTX_FIELDS(COPY)
		m->comm = (char *)from->comm;
		m->ibdev = (char *)from->ibdev;
	}
	Migr__Pd *pd;
	TAKE_MESSAGES(a, Migr__Pd, migr__pd__init, c->rec.nr_pd, m->pd, pd);
	m->n_pd = c->rec.nr_pd;
	for (uint32_t i = 0; i < c->rec.nr_pd; i++) {
		const struct migr_pd_rec *from = &c->pds[i].rec;
		Migr__Pd *to = &pd[i];

		PD_FIELDS(COPY)
	}
	Migr__Mr *mr;
	TAKE_MESSAGES(a, Migr__Mr, migr__mr__init, c->rec.nr_mr, m->mr, mr);
	m->n_mr = c->rec.nr_mr;
	for (uint32_t i = 0; i < c->rec.nr_mr; i++) {
		const struct migr_mr_rec *from = &c->mrs[i].rec;
		Migr__Mr *to = &mr[i];

		MR_FIELDS(COPY)
	}
	Migr__Cq *cq;
	TAKE_MESSAGES(a, Migr__Cq, migr__cq__init, c->rec.nr_cq, m->cq, cq);
	m->n_cq = c->rec.nr_cq;
	for (uint32_t i = 0; i < c->rec.nr_cq; i++) {
		const struct migr_cq_rec *from = &c->cqs[i].rec;
		Migr__Cq *to = &cq[i];

		CQ_FIELDS(COPY)
		to->driver_resp = bytes_of(c->cqs[i].resp.data, c->cqs[i].resp.len);
	}
	Migr__Qp *qp;
	Migr__AhAttr *ah, **unused;
	TAKE_MESSAGES(a, Migr__Qp, migr__qp__init, c->rec.nr_qp, m->qp, qp);
	TAKE_MESSAGES(a, Migr__AhAttr, migr__ah_attr__init, c->rec.nr_qp, unused, ah);
	m->n_qp = c->rec.nr_qp;
	for (uint32_t i = 0; i < c->rec.nr_qp; i++) {
		const struct migr_qp_rec *from = &c->qps[i].rec;
		Migr__Qp *to = &qp[i];

		QP_FIELDS(COPY)
		to->driver_resp = bytes_of(c->qps[i].resp.data, c->qps[i].resp.len);
		to->ah = &ah[i];
		{
			const struct migr_ah_attr *from = &c->qps[i].rec.ah;
			Migr__AhAttr *to = &ah[i];

			AH_FIELDS(COPY)
			to->dgid = bytes_of(from->dgid, sizeof(from->dgid));
			to->sgid = bytes_of(from->sgid, sizeof(from->sgid));
			to->dmac = bytes_of(from->dmac, sizeof(from->dmac));
		}
	}
	Migr__Srq *srq;
	TAKE_MESSAGES(a, Migr__Srq, migr__srq__init, c->rec.nr_srq, m->srq, srq);
	m->n_srq = c->rec.nr_srq;
	for (uint32_t i = 0; i < c->rec.nr_srq; i++) {
		const struct migr_srq_rec *from = &c->srqs[i].rec;
		Migr__Srq *to = &srq[i];

		SRQ_FIELDS(COPY)
		to->driver_resp = bytes_of(c->srqs[i].resp.data, c->srqs[i].resp.len);
	}
	Migr__Other *other;
	TAKE_MESSAGES(a, Migr__Other, migr__other__init, c->nr_others, m->other, other);
	m->n_other = c->nr_others;
	for (uint32_t i = 0; i < c->nr_others; i++) {
		const struct migr_other_rec *from = &c->others[i].rec;
		Migr__Other *to = &other[i];

		OTHER_FIELDS(COPY)
		to->obj_type = c->others[i].obj_type;
	}
	return 0;
}

static int pack_process(struct arena *a, const struct migr_rst_process *p, Migr__Process *m)
{
	Migr__FdDesc *fd;
	Migr__Context *c;

	m->pid = p->pid;
	m->ns_pid = p->ns_pid;
	m->instance = bytes_of(p->instance, sizeof(p->instance));
	TAKE_MESSAGES(a, Migr__FdDesc, migr__fd_desc__init, p->nr_fds, m->fd, fd);
	m->n_fd = p->nr_fds;
	for (uint32_t i = 0; i < p->nr_fds; i++) {
		const struct migr_fd_desc *from = &p->fds[i];
		Migr__FdDesc *to = &fd[i];

		FD_FIELDS(COPY)
	}
	TAKE_MESSAGES(a, Migr__Context, migr__context__init, p->nr_contexts, m->context, c);
	m->n_context = p->nr_contexts;
	for (uint32_t i = 0; i < p->nr_contexts; i++) {
		int ret = pack_context(a, &p->contexts[i], &c[i]);

		if (ret)
			return ret;
	}
	return 0;
}

/* Packs any message into an envelope. */
static int seal(const char magic[8], const ProtobufCMessage *m, void **buf, size_t *len)
{
	size_t n = protobuf_c_message_get_packed_size(m);
	uint8_t *out = malloc(sizeof(struct envelope) + n);
	struct envelope e;

	if (!out)
		return -ENOMEM;
	protobuf_c_message_pack(m, out + sizeof(e));
	memcpy(e.magic, magic, 8);
	e.version = htole32(MIGR_RST_IMAGE_VERSION);
	e.crc = htole32(crc32_of(out + sizeof(e), n));
	e.bytes = htole64(n);
	memcpy(out, &e, sizeof(e));
	*buf = out;
	*len = sizeof(e) + n;
	return 0;
}

/* Checks the envelope; the payload is at *payload, *n bytes. */
static int unseal(const char magic[8], const char *name, const void *buf, size_t len, const uint8_t **payload,
		  size_t *n, struct migr_rst_err *err)
{
	struct envelope e;

	if (len < sizeof(e))
		return rst_fail(err, EBADMSG, "%s is truncated: %zu bytes, its head has %zu", name, len, sizeof(e));
	memcpy(&e, buf, sizeof(e));
	if (memcmp(e.magic, magic, 8))
		return rst_fail(err, EBADMSG, "%s is not an image of migr (wrong magic)", name);
	if (le32toh(e.version) != MIGR_RST_IMAGE_VERSION)
		return rst_fail(err, EPROTONOSUPPORT,
				"%s has format version %u, this migr reads %u: use the same migr on both hosts", name,
				le32toh(e.version), MIGR_RST_IMAGE_VERSION);
	if (le64toh(e.bytes) != len - sizeof(e))
		return rst_fail(err, EBADMSG, "%s is truncated or has a tail: %zu bytes of content, %llu announced",
				name, len - sizeof(e), (unsigned long long)le64toh(e.bytes));
	*payload = (const uint8_t *)buf + sizeof(e);
	*n = len - sizeof(e);
	if (crc32_of(*payload, *n) != le32toh(e.crc))
		return rst_fail(err, EBADMSG, "%s is damaged: its checksum does not fit", name);
	return 0;
}

int migr_rst_pack(const struct migr_rst_image *img, void **buf, size_t *len, struct migr_rst_err *err)
{
	struct arena a = { NULL };
	Migr__Image m = MIGR__IMAGE__INIT;
	Migr__Process *procs = take(&a, (img->nr_processes + 1) * sizeof(*procs));
	int ret = procs ? 0 : -ENOMEM;

	m.abi_version = MIGR_ABI_VERSION;
	m.n_process = img->nr_processes;
	m.process = take(&a, (img->nr_processes + 1) * sizeof(*m.process));
	if (!m.process)
		ret = -ENOMEM;
	for (uint32_t i = 0; !ret && i < img->nr_processes; i++) {
		migr__process__init(&procs[i]);
		m.process[i] = &procs[i];
		ret = pack_process(&a, img->processes[i], &procs[i]);
	}
	if (!ret)
		ret = seal(image_magic, &m.base, buf, len);
	arena_free(&a);
	if (ret)
		rst_fail(err, -ret, "no memory to pack the image of %u processes", img->nr_processes);
	return ret;
}

/* ---- unpack ---------------------------------------------------------------- */

static int get_bytes(void *to, size_t size, ProtobufCBinaryData from)
{
	if (from.len != size)
		return -EBADMSG;
	memcpy(to, from.data, size);
	return 0;
}

static int get_text(char *to, size_t size, const char *from)
{
	if (strlen(from) >= size)
		return -EBADMSG;
	strcpy(to, from);
	return 0;
}

static int get_resp(struct migr_rst_resp *to, ProtobufCBinaryData from)
{
	if (from.len > sizeof(to->data))
		return -EBADMSG;
	if (from.len)
		memcpy(to->data, from.data, from.len);
	to->len = from.len;
	return 0;
}

static int unpack_context(const Migr__Context *m, struct migr_rst_context *c)
{
	{
		const Migr__Context *from = m;
		struct migr_ctx_rec *to = &c->rec;

		CTX_FIELDS(COPY)
	}
	if (get_text(c->rec.comm, sizeof(c->rec.comm), m->comm) ||
	    get_text(c->rec.ibdev, sizeof(c->rec.ibdev), m->ibdev))
		return -EBADMSG;
	for (size_t i = 0; i < m->n_pd; i++) {
		struct migr_rst_pd *pd = migr_rst_add_pd(c);
		const Migr__Pd *from = m->pd[i];

		if (!pd)
			return -ENOMEM;
		struct migr_pd_rec *to = &pd->rec;

		PD_FIELDS(COPY)
	}
	for (size_t i = 0; i < m->n_mr; i++) {
		struct migr_rst_mr *mr = migr_rst_add_mr(c);
		const Migr__Mr *from = m->mr[i];

		if (!mr)
			return -ENOMEM;
		struct migr_mr_rec *to = &mr->rec;

		MR_FIELDS(COPY)
	}
	for (size_t i = 0; i < m->n_cq; i++) {
		struct migr_rst_cq *cq = migr_rst_add_cq(c);
		const Migr__Cq *from = m->cq[i];

		if (!cq)
			return -ENOMEM;
		struct migr_cq_rec *to = &cq->rec;

		CQ_FIELDS(COPY)
		if (get_resp(&cq->resp, from->driver_resp))
			return -EBADMSG;
	}
	for (size_t i = 0; i < m->n_qp; i++) {
		struct migr_rst_qp *qp = migr_rst_add_qp(c);
		const Migr__Qp *from = m->qp[i];

		if (!qp)
			return -ENOMEM;
		struct migr_qp_rec *to = &qp->rec;

		QP_FIELDS(COPY)
		if (get_resp(&qp->resp, from->driver_resp))
			return -EBADMSG;
		if (from->ah) {
			const Migr__AhAttr *from = m->qp[i]->ah;
			struct migr_ah_attr *to = &qp->rec.ah;

			AH_FIELDS(COPY)
			if (get_bytes(to->dgid, sizeof(to->dgid), from->dgid) ||
			    get_bytes(to->sgid, sizeof(to->sgid), from->sgid) ||
			    get_bytes(to->dmac, sizeof(to->dmac), from->dmac))
				return -EBADMSG;
		}
	}
	for (size_t i = 0; i < m->n_srq; i++) {
		struct migr_rst_srq *srq = migr_rst_add_srq(c);
		const Migr__Srq *from = m->srq[i];

		if (!srq)
			return -ENOMEM;
		struct migr_srq_rec *to = &srq->rec;

		SRQ_FIELDS(COPY)
		if (get_resp(&srq->resp, from->driver_resp))
			return -EBADMSG;
	}
	for (size_t i = 0; i < m->n_other; i++) {
		struct migr_rst_other *o = migr_rst_add_other(c);
		const Migr__Other *from = m->other[i];

		if (!o)
			return -ENOMEM;
		struct migr_other_rec *to = &o->rec;

		OTHER_FIELDS(COPY)
		o->obj_type = from->obj_type;
	}
	return 0;
}

static int unpack_process(const Migr__Process *m, struct migr_rst_process *p)
{
	p->pid = m->pid;
	p->ns_pid = m->ns_pid;
	if (get_bytes(p->instance, sizeof(p->instance), m->instance))
		return -EBADMSG;
	if (m->n_fd) {
		p->fds = calloc(m->n_fd, sizeof(*p->fds));
		if (!p->fds)
			return -ENOMEM;
	}
	for (size_t i = 0; i < m->n_fd; i++) {
		const Migr__FdDesc *from = m->fd[i];
		struct migr_fd_desc *to = &p->fds[p->nr_fds++];

		FD_FIELDS(COPY)
	}
	for (size_t i = 0; i < m->n_context; i++) {
		struct migr_rst_context *c = migr_rst_add_context(p);
		int ret = c ? unpack_context(m->context[i], c) : -ENOMEM;

		if (ret)
			return ret;
	}
	return 0;
}

int migr_rst_unpack(const void *buf, size_t len, struct migr_rst_image **out, struct migr_rst_err *err)
{
	const uint8_t *payload;
	size_t n;
	int ret = unseal(image_magic, MIGR_RST_IMAGE_NAME, buf, len, &payload, &n, err);

	if (ret)
		return ret;
	Migr__Image *m = migr__image__unpack(NULL, n, payload);
	if (!m)
		return rst_fail(err, EBADMSG, "%s is damaged: its content cannot be decoded", MIGR_RST_IMAGE_NAME);
	if (m->abi_version != MIGR_ABI_VERSION) {
		ret = rst_fail(err, EPROTONOSUPPORT, "%s records ABI version %u of migr.ko, this migr knows %u",
			       MIGR_RST_IMAGE_NAME, m->abi_version, MIGR_ABI_VERSION);
		migr__image__free_unpacked(m, NULL);
		return ret;
	}
	struct migr_rst_image *img = migr_rst_image_new();
	ret = img ? 0 : -ENOMEM;
	for (size_t i = 0; !ret && i < m->n_process; i++) {
		struct migr_rst_process *p = migr_rst_process_new(0);

		ret = p ? migr_rst_image_add(img, p) : -ENOMEM;
		if (ret) {
			migr_rst_process_free(p);
			break;
		}
		ret = unpack_process(m->process[i], p);
	}
	migr__image__free_unpacked(m, NULL);
	if (ret) {
		migr_rst_image_free(img);
		return rst_fail(err, -ret, ret == -ENOMEM ? "no memory to unpack %s" :
				"%s is damaged: a field has an impossible length", MIGR_RST_IMAGE_NAME);
	}
	*out = img;
	return 0;
}

/* ---- files ----------------------------------------------------------------- */

static int write_all(int fd, const uint8_t *p, size_t n)
{
	while (n) {
		ssize_t w = write(fd, p, n);

		if (w < 0 && errno == EINTR)
			continue;
		if (w < 0)
			return -errno;
		p += w;
		n -= w;
	}
	return 0;
}

/* @lasting: it is needed after the host has lost its power, too. */
static int store(int dirfd, const char *name, const void *buf, size_t len, int lasting, struct migr_rst_err *err)
{
	char tmp[64];
	int ret, fd;

	snprintf(tmp, sizeof(tmp), ".%s.%d", name, (int)getpid());
	unlinkat(dirfd, tmp, 0);
	fd = openat(dirfd, tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return rst_fail(err, errno, "cannot create %s: %s", name, strerror(errno));
	ret = write_all(fd, buf, len);
	if (!ret && lasting && fsync(fd))
		ret = -errno;
	if (close(fd) && !ret)
		ret = -errno;
	if (!ret && renameat(dirfd, tmp, dirfd, name))
		ret = -errno;
	if (ret) {
		unlinkat(dirfd, tmp, 0);
		return rst_fail(err, -ret, "cannot write %s: %s", name, strerror(-ret));
	}
	if (lasting && fsync(dirfd) && errno != EINVAL && errno != EBADF)
		return rst_fail(err, errno, "cannot sync the folder of %s: %s", name, strerror(errno));
	return 0;
}

static int load(int dirfd, const char *name, void **buf, size_t *len, struct migr_rst_err *err)
{
	int fd = openat(dirfd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	struct stat st;
	uint8_t *p = NULL;
	size_t got = 0;

	if (fd < 0)
		return rst_fail(err, errno, "cannot open %s: %s", name, strerror(errno));
	if (fstat(fd, &st) || !S_ISREG(st.st_mode) || (uint64_t)st.st_size > MIGR_RST_IMAGE_MAX) {
		close(fd);
		return rst_fail(err, EBADMSG, "%s is not a file of at most %u MB", name, MIGR_RST_IMAGE_MAX >> 20);
	}
	if (st.st_mode & 077) {
		close(fd);
		return rst_fail(err, EACCES, "%s is open to others (mode %04o), and it holds keys: chmod 600, and 700 its folder", name,
				st.st_mode & 07777);
	}
	p = malloc(st.st_size + 1);
	if (!p) {
		close(fd);
		return rst_fail(err, ENOMEM, "no memory for %s", name);
	}
	while (got < (size_t)st.st_size) {
		ssize_t r = read(fd, p + got, st.st_size - got);

		if (r < 0 && errno == EINTR)
			continue;
		if (r < 0) {
			int e = errno;

			free(p);
			close(fd);
			return rst_fail(err, e, "cannot read %s: %s", name, strerror(e));
		}
		if (r == 0)
			break;
		got += r;
	}
	close(fd);
	*buf = p;
	*len = got;
	return 0;
}

int migr_rst_write(const struct migr_rst_image *img, int dirfd, struct migr_rst_err *err)
{
	void *buf;
	size_t len;
	int ret = migr_rst_pack(img, &buf, &len, err);

	if (ret)
		return ret;
	ret = store(dirfd, MIGR_RST_IMAGE_NAME, buf, len, 1, err);
	free(buf);
	return ret;
}

int migr_rst_read(int dirfd, struct migr_rst_image **out, struct migr_rst_err *err)
{
	void *buf;
	size_t len;
	int ret = load(dirfd, MIGR_RST_IMAGE_NAME, &buf, &len, err);

	if (ret)
		return ret;
	ret = migr_rst_unpack(buf, len, out, err);
	free(buf);
	return ret;
}

int migr_rst_files_write(const struct migr_rst_file *files, uint32_t nr, int dirfd, struct migr_rst_err *err)
{
	Migr__Files m = MIGR__FILES__INIT;
	Migr__File *file = calloc(nr + 1, sizeof(*file));
	void *buf;
	size_t len;
	int ret = -ENOMEM;

	m.file = calloc(nr + 1, sizeof(*m.file));
	m.n_file = nr;
	if (file && m.file) {
		for (uint32_t i = 0; i < nr; i++) {
			const struct migr_rst_file *from = &files[i];
			Migr__File *to = &file[i];

			migr__file__init(to);
			FILE_FIELDS(COPY)
			m.file[i] = to;
		}
		ret = seal(files_magic, &m.base, &buf, &len);
	}
	free(m.file);
	free(file);
	if (ret)
		return rst_fail(err, -ret, "no memory to pack %s", MIGR_RST_FILES_NAME);
	ret = store(dirfd, MIGR_RST_FILES_NAME, buf, len, 0, err);
	free(buf);
	return ret;
}

int migr_rst_files_read(int dirfd, struct migr_rst_file **out, uint32_t *nr, struct migr_rst_err *err)
{
	const uint8_t *payload;
	size_t len, n;
	void *buf;
	int ret = load(dirfd, MIGR_RST_FILES_NAME, &buf, &len, err);

	if (ret)
		return ret;
	ret = unseal(files_magic, MIGR_RST_FILES_NAME, buf, len, &payload, &n, err);
	if (ret) {
		free(buf);
		return ret;
	}
	Migr__Files *m = migr__files__unpack(NULL, n, payload);
	free(buf);
	if (!m)
		return rst_fail(err, EBADMSG, "%s is damaged: its content cannot be decoded", MIGR_RST_FILES_NAME);
	struct migr_rst_file *files = calloc(m->n_file + 1, sizeof(*files));
	if (files)
		for (size_t i = 0; i < m->n_file; i++) {
			const Migr__File *from = m->file[i];
			struct migr_rst_file *to = &files[i];

			FILE_FIELDS(COPY)
		}
	*out = files;
	*nr = m->n_file;
	migr__files__free_unpacked(m, NULL);
	return files ? 0 : rst_fail(err, ENOMEM, "no memory for %s", MIGR_RST_FILES_NAME);
}
