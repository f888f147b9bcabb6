/* Everything that a team does, by changing numbers of threads: for a compiler that finds what they race for, which no
 * result shows and a processor with a strict order of its own hides. Compiled together with step.c. */
#define INPUTS 32 /* of every layer */
#define VOCAB 100
#define MOST 12 /* rows */
#define THREADS 4
#define RANK 4

static float zeros[8 * (VOCAB + PANEL) * INPUTS], cache[2 * 2 * 2 * 16 * INPUTS], logits[MOST * VOCAB];

static Linear linear(int64_t parts, int64_t first, int64_t second, int64_t third) {
    return (Linear){zeros, NULL, INPUTS, parts, {first, second, third}};
}

int main(void) {
    Layer layer[2];
    for (int i = 0; i < 2; i++)
        layer[i] = (Layer){
            .input_norm = zeros, .mlp_norm = zeros, .q_norm = zeros, .k_norm = zeros,
            .qkv = linear(3, 32, 16, 16), .o = linear(1, 32, 0, 0), .gate_up = linear(2, 32, 32, 0),
            .down = linear(1, 32, 0, 0), .scale = 1};
    Model model = {
        .layers = 2, .hidden = 32, .heads = 2, .groups = 1, .channels = 16, .mlp = 32, .vocab = VOCAB, .blocks = 2,
        .block = 16, .kinds = 1, .eps = 1, .embed_scale = 1, .logit_cap = 1, .embed = zeros, .norm = zeros,
        .frequencies = zeros, .head = linear(1, VOCAB, 0, 0), .layer = layer, .cache = cache};
    Factors factors[9];
    for (int i = 0; i < 9; i++) factors[i] = (Factors){zeros, {zeros, zeros, zeros}, RANK};
    int64_t tokens[MOST] = {0}, positions[MOST], tables[MOST];
    for (int row = 0; row < MOST; row++) {
        positions[row] = row / 2;
        tables[row] = row % 2;
    }
    double numbers[MOST] = {0}, temperatures[MOST] = {0}, logprobs[MOST];
    Team *team = team_new(THREADS);
    for (int i = 0; i < 100; i++) {
        int64_t rows = 1 + i * 5 % MOST; /* so that now these threads take part and now those */
        Span span = {rows / 3, rows, factors};
        Step step = {rows, 1, 1, tokens, positions, tables, &span, NULL, logits};
        share = 20000;
        if (run_rows(&model, &step, team)) return 1;
        share = 5000;
        if (draw(logits, rows, VOCAB, numbers, temperatures, tokens, logprobs, team)) return 1;
        product(&model.head, zeros, rows, logits, team);
    }
    team_free(team);
    return 0;
}
