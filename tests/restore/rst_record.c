// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * rst_record PID FDS DIR: what migrd does on a source, in small: the record of
 * process PID from migr.ko, with the descriptions that ring_app wrote to FDS (its
 * context numbers 1.. become the module's, in order), to DIR/migr.img.
 * rst_record --show DIR: prints DIR/migr.img.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "migr/restore.h"

static struct migr_rst_err err;

static int fail(void)
{
	fprintf(stderr, "rst_record: %s\n", err.text);
	return 1;
}

/* One object a line, without what differs by who wrote it: for people and diff(1). */
static int show(int dir)
{
	struct migr_rst_image *img;

	if (migr_rst_read(dir, &img, &err))
		return fail();
	for (uint32_t i = 0; i < img->nr_processes; i++)
		for (uint32_t k = 0; k < img->processes[i]->nr_contexts; k++) {
			const struct migr_rst_context *c = &img->processes[i]->contexts[k];

			printf("context %u %s pid %u\n", k + 1, c->rec.ibdev, img->processes[i]->pid);
			for (uint32_t n = 0; n < c->rec.nr_pd; n++)
				printf("pd %u\n", c->pds[n].rec.handle);
			for (uint32_t n = 0; n < c->rec.nr_mr; n++) {
				const struct migr_mr_rec *r = &c->mrs[n].rec;

				printf("mr %u pd %u %#" PRIx64 "+%#" PRIx64 " iova %#" PRIx64 " access %#x lkey %#x\n",
				       r->handle, r->pd_handle, (uint64_t)r->start, (uint64_t)r->length,
				       (uint64_t)r->iova, r->access, r->plkey);
			}
			for (uint32_t n = 0; n < c->rec.nr_cq; n++) {
				const struct migr_cq_rec *r = &c->cqs[n].rec;
				struct migr_rst_ring g[2];

				migr_rst_rings(MIGR_OBJ_CQ, &c->cqs[n].resp, g);
				printf("cq %u cqe %u vector %u flags %#x channel %d user %#" PRIx64 " ring %#" PRIx64 "\n",
				       r->handle, r->cqe, r->comp_vector, r->flags, r->channel != 0,
				       (uint64_t)r->user_handle, g[0].pgoff);
			}
			for (uint32_t n = 0; n < c->rec.nr_qp; n++) {
				const struct migr_qp_rec *r = &c->qps[n].rec;
				struct migr_rst_ring g[2];

				migr_rst_rings(MIGR_OBJ_QP, &c->qps[n].resp, g);
				printf("qp %u v %#x p %#x pd %u cq %u %u srq %#x type %u user %#" PRIx64
				       " wr %u %u sge %u %u inline %u sig %u flags %#x state %u mtu %u psn %#x %#x"
				       " dest %#x access %#x pkey %u port %u timeout %u retry %u rnr %u %u rd %u %u"
				       " gid %02x%02x%02x%02x type %u index %u hop %u rings %#" PRIx64 " %#" PRIx64 "\n",
				       r->handle, r->vqpn, r->pqpn, r->pd_handle, r->send_cq_handle, r->recv_cq_handle,
				       r->srq_handle, r->qp_type, (uint64_t)r->user_handle, r->max_send_wr,
				       r->max_recv_wr, r->max_send_sge, r->max_recv_sge, r->max_inline_data,
				       r->sq_sig_all, r->create_flags, r->qp_state, r->path_mtu, r->rq_psn, r->sq_psn,
				       r->dest_qpn, r->access_flags, r->pkey_index, r->port_num, r->timeout,
				       r->retry_cnt, r->rnr_retry, r->min_rnr_timer, r->max_rd_atomic,
				       r->max_dest_rd_atomic, r->ah.sgid[12], r->ah.sgid[13], r->ah.sgid[14],
				       r->ah.sgid[15], r->ah.gid_type, r->ah.sgid_index, r->ah.hop_limit, g[0].pgoff,
				       g[1].pgoff);
			}
		}
	migr_rst_image_free(img);
	return 0;
}

static uint32_t read_fds(const char *path, const struct migr_rst_process *p, struct migr_fd_desc *d, uint32_t max)
{
	FILE *f = fopen(path, "r");
	uint32_t n = 0;

	while (f && n < max &&
	       fscanf(f, "%u %d %d %u %u %u %u %u %" SCNu64 " %" SCNu64 " %" SCNu64, &d[n].kind, &d[n].fd,
		      &d[n].context_fd, &d[n].ctx_id, &d[n].cq_handle, &d[n].obj_type, &d[n].obj_handle, &d[n].ring,
		      &d[n].addr, &d[n].bytes, &d[n].pgoff) == 11) {
		if (d[n].ctx_id && d[n].ctx_id <= p->nr_contexts)	/* MIGR_FD_AHEAD is of none */
			d[n].ctx_id = p->contexts[d[n].ctx_id - 1].rec.ctx_id;
		n++;
	}
	if (f)
		fclose(f);
	return n;
}

int main(int argc, char **argv)
{
	static struct migr_fd_desc fds[4096];
	struct migr_rst_process *p;
	struct migr_rst_image *img;
	struct migr_rst *s;
	int dir;

	if (argc == 3 && !strcmp(argv[1], "--show"))
		return show(open(argv[2], O_RDONLY | O_DIRECTORY));
	if (argc != 4) {
		fprintf(stderr, "usage: rst_record PID FDS DIR\n");
		return 1;
	}
	dir = open(argv[3], O_RDONLY | O_DIRECTORY);
	if (migr_rst_open(&s, &err) || migr_rst_dump(s, strtoul(argv[1], NULL, 10), &p, &err))
		return fail();
	migr_rst_close(s);
	migr_rst_process_describe(p, fds, read_fds(argv[2], p, fds, 4096), NULL);
	img = migr_rst_image_new();
	if (migr_rst_process_check(p, &err) || migr_rst_image_add(img, p) || migr_rst_write(img, dir, &err))
		return fail();
	printf("%u contexts recorded\n", p->nr_contexts);
	migr_rst_image_free(img);
	return 0;
}
